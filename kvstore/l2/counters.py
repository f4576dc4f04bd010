"""Counters of one tier; every degraded decision has one of its own."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields


@dataclass(slots=True)
class TierCounters:
    """What happened at one tier since open; blocks unless the name says otherwise.

    ``lookups == hits + misses`` holds at any quiet moment.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    bytes_out: int = 0
    stored: int = 0
    stored_raw_bytes: int = 0
    stored_bytes: int = 0
    already_stored: int = 0
    refused_queue_full: int = 0
    refused_medium: int = 0
    stores_dropped: int = 0
    corrupt: int = 0
    key_mismatch: int = 0
    spec_mismatch: int = 0
    io_errors: int = 0
    timeouts: int = 0
    rejected_by_breaker: int = 0
    late: int = 0
    evicted: int = 0


class Counters:
    """A :class:`TierCounters` that many threads may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = TierCounters()

    def add(self, **amounts: int) -> None:
        """Add to several counters at once, so that sums stay consistent."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._values, name, getattr(self._values, name) + amount)

    def snapshot(self) -> TierCounters:
        """A consistent copy."""
        with self._lock:
            return TierCounters(**{f.name: getattr(self._values, f.name) for f in fields(TierCounters)})
