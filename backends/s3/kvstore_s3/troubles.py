"""Counts failed requests by kind and says each kind once a minute."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from kvstore_s3.errors import S3Error, Trouble

_LOG_INTERVAL_S: Final = 60.0  # an operator's view; a throttled bucket fails thousands of times a minute


class Troubles:
    """Counters of one tier; thread-safe."""

    def __init__(self, place: str, logger: logging.Logger) -> None:
        self._place: Final = place
        self._logger: Final = logger
        self._lock: Final = threading.Lock()
        self._counts: Final = dict.fromkeys(Trouble, 0)
        self._said_at: Final[dict[Trouble, float]] = {}

    def note(self, error: S3Error, doing: str) -> None:
        """Count a failure; log it unless its kind was logged within the last minute."""
        if error.trouble is Trouble.CANCELLED:
            return
        now = time.monotonic()
        with self._lock:
            self._counts[error.trouble] += 1
            count = self._counts[error.trouble]
            last = self._said_at.get(error.trouble)
            silent = last is not None and now - last < _LOG_INTERVAL_S
            if not silent:
                self._said_at[error.trouble] = now
        if not silent:
            # as text: handlers that keep records would keep the error's frames, and with them connections
            kind = error.trouble.value
            self._logger.warning("%s: %s: %s (%s so far: %d)", self._place, doing, str(error), kind, count)

    def counts(self) -> dict[str, int]:
        """Failures since open by kind; kinds that never happened are left out."""
        with self._lock:
            return {trouble.value: count for trouble, count in self._counts.items() if count}
