"""What L1 counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class L1Counters:
    """A consistent snapshot of L1; bytes are block bytes, without header pages.

    Attributes:
        capacity_blocks: Slots of the pool.
        resident_blocks: Blocks in the index.
        resident_bytes: Their bytes.
        pinned_blocks: Blocks with at least one pin, deleted ones included.
        orphaned_bytes: Bytes of resident blocks whose parent has left L1.
        evictions: Blocks evicted since open, each to make room for another one.
        leases_dropped: Leases and reservations that were dropped without release and reclaimed.
        reclaimed_writes: Queued writes taken back because nothing but them pinned the last slots.
        reserve_failures: ``reserve`` calls that got fewer slots than they asked for.
        pinned_host_bytes: Bytes of the pool that are page-locked for an accelerator.
        pin_refusals: 1 when the system refused to page-lock the pool.
        device_capacity_blocks: Slots of the device pool; 0 without one.
        device_blocks: Blocks with a copy there.
        device_hits: Blocks that were delivered from there instead of from host memory.
        device_evictions: Copies that made room for others.
    """

    capacity_blocks: int
    resident_blocks: int
    resident_bytes: int
    pinned_blocks: int
    orphaned_bytes: int
    evictions: int
    leases_dropped: int
    reclaimed_writes: int
    reserve_failures: int
    pinned_host_bytes: int = 0
    pin_refusals: int = 0
    device_capacity_blocks: int = 0
    device_blocks: int = 0
    device_hits: int = 0
    device_evictions: int = 0
