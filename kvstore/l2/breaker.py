"""A circuit breaker: stop asking a tier that keeps failing, and notice when it is back."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

FAILURES_TO_OPEN: Final = 5  # consecutive; one slow disk hiccup must not close a tier
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
_LOG_INTERVAL_S: Final = 60.0

logger = logging.getLogger("kvstore.tier")


class Breaker:
    """Counts consecutive failures of one side (reads or writes) of a tier; thread-safe.

    Closed: everything passes.  When one kind of operation fails :data:`FAILURES_TO_OPEN` times in
    a row it opens and nothing passes for a pause.  Then operations pass one at a time (half-open):
    a failure doubles the pause up to :data:`LONGEST_PAUSE_S`; only a success of the kind that
    failed, or of one that proves more, closes the breaker: a medium that answers existence but no
    reads stays suspected.
    """

    def __init__(
        self,
        name: str,
        *,
        on_change: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        self._open = False
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0
        self._probing = False
        self._probe_ends = 0.0
        self._last_error = ""
        self._last_log = -_LOG_INTERVAL_S

    @property
    def state(self) -> str:
        """``"closed"`` (healthy), ``"open"`` or ``"half-open"``."""
        with self._lock:
            if not self._open:
                return "closed"
            return "open" if self._clock() < self._open_until else "half-open"

    @property
    def last_error(self) -> str:
        """Text of the newest failure; empty once its kind of operation went well again."""
        return self._last_error if self._failures else ""

    def allow(self, patience_s: float = math.inf) -> bool:
        """Whether an operation may be tried now; if so, ``succeeded``, ``failed`` or ``left`` must follow.

        Args:
            patience_s: Seconds after which an operation that was let through while the breaker is
                open, and of which nothing was heard, counts as failed.
        """
        if not self._open:  # racy read on purpose: the healthy path takes no lock
            return True
        now = self._clock()
        with self._lock:
            if not self._open:
                return True
            if self._probing and now >= self._probe_ends:
                self._pause(now)
            if self._probing or now < self._open_until:
                return False
            self._probing = True
            self._probe_ends = now + patience_s
            return True

    def _pause(self, now: float) -> None:
        self._probing = False
        self._open = True
        self._open_until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def succeeded(self, operation: str, *, proves_all: bool = False) -> None:
        """Note an operation that went well.

        Args:
            operation: Its kind.
            proves_all: It does all that the other kinds need, so that their failures are over, too.
        """
        if not self._failures:
            return
        with self._lock:
            self._probing = False
            if proves_all:
                self._failures.clear()
            self._failures.pop(operation, None)
            closing = self._open and all(n < FAILURES_TO_OPEN for n in self._failures.values())
            if closing:
                self._open = False
                self._pause_s = FIRST_PAUSE_S
        if closing:
            logger.warning("tier %s works again", self._name)
            self._changed("works again")

    def _changed(self, state: str) -> None:
        if self._on_change is not None:
            self._on_change(self._name, state)

    def left(self) -> None:
        """Note an operation whose caller was interrupted: it says nothing, and another may try."""
        with self._lock:
            self._probing = False

    def failed(self, operation: str, error: BaseException) -> None:
        """Note a failed operation; logs at most one line a minute.

        Operations that began before it opened and fail during the pause do not lengthen it: many
        callers at once would turn a second of trouble into the longest pause.
        """
        now = self._clock()
        with self._lock:
            self._failures[operation] = self._failures.get(operation, 0) + 1
            self._last_error = f"{type(error).__name__}: {error}"
            opening = not self._open and self._failures[operation] >= FAILURES_TO_OPEN
            if not self._open or now >= self._open_until:
                self._probing = False
                if self._failures[operation] >= FAILURES_TO_OPEN:
                    self._pause(now)
            log = now - self._last_log >= _LOG_INTERVAL_S
            if log:
                self._last_log = now
        if opening:
            self._changed("suspended")
        if log:
            logger.warning("tier %s failed, which counts as a miss or a refused put: %s", self._name, self._last_error)
