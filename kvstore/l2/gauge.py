"""A tier's space, asked for without ever waiting long."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kvstore.errors import BackendUnavailableError
from kvstore.l2.workers import Job

if TYPE_CHECKING:
    from kvstore.backend import Usage
    from kvstore.l2.tier import Tier

_AGE_S: Final = 1.0  # a backend's usage is cheap enough to be asked for once a second, says the contract
_WAIT_S: Final = 0.25  # what a call of stats() may cost when a slow medium does not answer


class Gauge:
    """Asks a tier for its usage; thread-safe.

    A medium that is plain memory is asked each time.  Any other is asked by the tier's threads,
    once a second at most, and a question that does not end is not asked again before it does: the
    last known answer stands in.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._known: Usage | None = None
        self._asked_at = float("-inf")
        self._job: Job[None] | None = None

    def usage(self) -> Usage | None:
        """Space on the medium, a second old at most while it answers; None when it never did."""
        if self._tier.direct:
            return self._tier.usage()
        job = self._ask()
        if job is not None:
            job.wait(_WAIT_S)
        return self._known

    def _ask(self) -> Job[None] | None:
        """Start a question, unless one is under way or the answer is fresh."""
        with self._lock:
            now = time.monotonic()
            if now - self._asked_at < _AGE_S or (self._job is not None and not self._job.ended):
                return None
            self._asked_at = now
            self._job = job = Job(self._refresh)
        try:
            self._tier.workers.submit(job)
        except BackendUnavailableError:  # every thread is stuck, or the tier is closed
            job.ended = True
            return None
        return job

    def _refresh(self) -> None:
        usage = self._tier.usage()
        if usage is not None:
            self._known = usage
