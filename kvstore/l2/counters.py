"""Counters of one tier; every degraded decision has one of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounters:
    """What happened at one tier since open; blocks unless the name says otherwise.

    ``lookups == hits + misses`` holds at any quiet moment.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    gated: int = 0
    bytes_out: int = 0
    stored: int = 0
    stored_raw_bytes: int = 0
    stored_bytes: int = 0
    already_stored: int = 0
    refused_queue_full: int = 0
    refused_medium: int = 0
    stores_dropped: int = 0
    repaired: int = 0
    lost_from_l1: int = 0
    reread: int = 0
    corrupt: int = 0
    unauthenticated: int = 0
    key_mismatch: int = 0
    spec_mismatch: int = 0
    io_errors: int = 0
    timeouts: int = 0
    rejected_by_breaker: int = 0
    late: int = 0
    evicted: int = 0
