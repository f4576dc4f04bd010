"""The border between the core and a backend: whatever goes wrong there is counted and ends here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.errors import BackendError, BackendTimeoutError, ClosedError, KVStoreError, PluginError
from kvstore.l2.breaker import Breaker
from kvstore.l2.workers import Job

if TYPE_CHECKING:
    from kvstore.counting import Counting
    from kvstore.l2.counters import TierCounters
    from kvstore.l2.workers import WorkerPool

T = TypeVar("T")

logger = logging.getLogger("kvstore.tier")

READING: Final = "get_many"
"""Name of every operation that moves records to the core, whichever method of the backend does it."""

_WRITES: Final = frozenset({"put_many", "delete_many", "discard", "clear", "touch_many", "maintain"})


class Border:
    """Runs a tier's backend operations; thread-safe.

    Two breakers: a medium that cannot write may well be read, so each side is suspended on its own.

    Args:
        tier: Name of the tier, for messages.
        plugin: Name of the backend, for messages.
        counters: Where failures are counted.
        deadline_s: After so many seconds without an end, a probe counts as failed.
        on_change: Called with a side's name and its new state.
    """

    def __init__(
        self,
        tier: str,
        plugin: str,
        counters: Counting[TierCounters],
        deadline_s: float,
        on_change: Callable[[str, str], None],
    ) -> None:
        self._plugin = plugin
        self._counters = counters
        self._deadline_s = deadline_s
        self._breakers = {
            writes: Breaker(f"{tier!r} ({'writes' if writes else 'reads'})", on_change=on_change)
            for writes in (False, True)
        }

    @property
    def suspended(self) -> bool:
        """Whether reads are not tried at the moment, so that the tier serves nothing."""
        return self._breakers[False].state != "closed"

    @property
    def last_error(self) -> str:
        """The newest failure that no success has followed; empty when all is well."""
        return self._breakers[False].last_error or self._breakers[True].last_error

    def guarded(self, operation: str, fn: Callable[[], T]) -> T | None:
        """Run a backend operation; any failure is counted, feeds the breaker and gives None."""
        return self._attempt(operation, fn) if self._allow(operation) else None

    def probe(self, operation: str, fn: Callable[[], object], pool: WorkerPool) -> None:
        """Run an operation of a suspended side in the background, one at a time, to see whether it is back."""
        if not self._allow(operation):
            return
        try:
            pool.submit(Job(lambda: self._attempt(operation, fn), patience_s=self._deadline_s))
        except BackendError as e:
            self.failed(operation, e)

    def failed(self, operation: str, error: KVStoreError) -> None:
        """Note a failed operation: a counter, the breaker, at most one log line a minute."""
        if isinstance(error, BackendTimeoutError):
            self._counters.add(timeouts=1)
        else:
            self._counters.add(io_errors=1)
        self._breakers[operation in _WRITES].failed(operation, error)

    def _allow(self, operation: str) -> bool:
        if self._breakers[operation in _WRITES].allow(self._deadline_s):
            return True
        self._counters.add(rejected_by_breaker=1)
        return False

    def _attempt(self, operation: str, fn: Callable[[], T]) -> T | None:
        breaker = self._breakers[operation in _WRITES]
        try:
            result = fn()
        except (BackendError, ClosedError) as e:
            self.failed(operation, e)
        except Exception as e:  # noqa: BLE001 - border: a plugin's bug must not reach the engine
            self.failed(operation, PluginError(f"backend {self._plugin!r} raised in {operation}: {e!r}"))
        except BaseException:
            breaker.left()
            raise
        else:
            breaker.succeeded(operation, proves_all=operation == READING)
            return result
        return None
