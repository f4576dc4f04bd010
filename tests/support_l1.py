"""Names of the L1 fixtures' types, and checks that several L1 test files share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.l1.cache import L1Cache
from kvstore.l1.entry import Entry

Chain = Callable[[str, int], list[bytes]]
MakeL1 = Callable[..., L1Cache]
Put = Callable[..., list[Entry]]
Content = Callable[[bytes, int], np.ndarray]


def read(l1: L1Cache, entry: Entry) -> bytes:
    return l1.pool.payload(entry.slot).tobytes()


def check_books(l1: L1Cache) -> None:
    """Every slot is free, reserved or owned by one entry; here nothing is reserved."""
    counters = l1.counters
    entries = l1._index.entries
    assert counters.resident_blocks == len(entries) == len(l1._index.policy)
    assert len({entry.slot for entry in entries.values()}) == len(entries)
    dead_pinned = counters.capacity_blocks - l1.pool.n_free - len(entries)
    assert counters.pinned_blocks == sum(1 for e in entries.values() if e.pins) + dead_pinned
    assert l1._index.idle == sum(1 for e in entries.values() if not e.pins)
