"""Blocks between callers' memory and L1, past the accelerator's copy of them where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.paged_device import DeviceRows, Keep

if TYPE_CHECKING:
    from kvstore.l1.cache import L1Cache
    from kvstore.l1.device_cache import DeviceCache
    from kvstore.l1.entry import Entry
    from kvstore.tensors import Rows


def deliver(l1: L1Cache, rows: Rows, blocks: Sequence[int], entries: Sequence[Entry]) -> None:
    """Copy pinned entries into a caller's blocks; the pins are free to go on return.

    Into memory of the device that L1 keeps copies on, what has a copy there is copied from it, and
    the rest gets one.
    """
    cache = _near(l1, rows)
    if cache is None or not isinstance(rows, DeviceRows):
        rows.fill_each(blocks, [l1.pool.payload(entry.slot) for entry in entries])
        return
    slots = cache.find(entries)
    there = [k for k, slot in enumerate(slots) if slot is not None]
    try:
        if there:
            rows.fill_from(cache, [blocks[k] for k in there], [slot for slot in slots if slot is not None])
    finally:
        cache.let_go([entries[k] for k in there])
    missing = [k for k, slot in enumerate(slots) if slot is None]
    snapshot = Snapshot(cache, [blocks[k] for k in missing])
    try:
        data = [l1.pool.payload(entries[k].slot) for k in missing]
        rows.fill_each([blocks[k] for k in missing], data, snapshot.keep)
    except BaseException:
        snapshot.discard()
        raise
    snapshot.publish([entries[k] for k in missing])


class Snapshot:
    """Device copies of blocks that are on their way into L1; ended by :meth:`publish` or :meth:`discard`.

    Args:
        cache: Where the copies go; None for nowhere.
        blocks: The caller's blocks, in key order.
    """

    def __init__(self, cache: DeviceCache | None, blocks: Sequence[int]) -> None:
        self._cache = cache
        self._slots = [] if cache is None else cache.reserve(len(blocks))
        self.keep = Keep(cache, dict(zip(blocks, self._slots, strict=False))) if cache is not None else None

    def publish(self, entries: Sequence[Entry], host_slots: Sequence[int] | None = None) -> None:
        """The blocks are these entries now.

        Args:
            entries: One per block.
            host_slots: Where the bytes were put; an entry that lies elsewhere was there before.
        """
        if self._cache is None:
            return
        kept = list(zip(entries, self._slots, strict=False))
        mine = [host_slots is None or entry.slot == host_slots[k] for k, (entry, _) in enumerate(kept)]
        good = [pair for pair, ok in zip(kept, mine, strict=True) if ok]
        self._cache.publish([entry for entry, _ in good], [slot for _, slot in good])
        used = {slot for _, slot in good}
        self._slots, rest = [], [slot for slot in self._slots if slot not in used]
        self._cache.release(rest)

    def discard(self) -> None:
        """The blocks did not get into L1."""
        if self._cache is not None:
            slots, self._slots = self._slots, []
            self._cache.release(slots)


def snapshot(l1: L1Cache, rows: Rows, blocks: Sequence[int], slots: Sequence[int]) -> Snapshot:
    """Copy a caller's blocks into reserved slots of L1, and onto the device that L1 keeps copies on."""
    taken = Snapshot(_near(l1, rows), blocks)
    try:
        payloads = [l1.pool.payload(slot) for slot in slots]
        if isinstance(rows, DeviceRows):
            rows.copy_each_to(blocks, payloads, taken.keep)
        else:
            rows.copy_each_to(blocks, payloads)
    except BaseException:
        taken.discard()
        raise
    return taken


def _near(l1: L1Cache, rows: Rows) -> DeviceCache | None:
    """The device copies that are in the same memory as the rows."""
    cache = l1.near
    return cache if cache is not None and isinstance(rows, DeviceRows) and rows.lane.device == cache.device else None
