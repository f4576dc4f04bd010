"""Copies of L1's blocks in the memory of an accelerator."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvstore.l1.device import TorchDevicePool, resolve_device, usable

if TYPE_CHECKING:
    import torch

    from kvstore.l1.entry import Entry
    from kvstore.l1.streams import Lane

logger = logging.getLogger("kvstore.cache")


@dataclass(slots=True)
class _Copy:
    entry: Entry
    slot: int
    readers: int = 0


class DeviceCache:
    """Device copies of blocks that are resident in L1, least recently used first to go.

    A copy belongs to one entry of the host index and is found through that entry only: a block that
    was deleted, cleared, evicted or replaced there is not found here, whatever is left of it.

    Thread-safe.  Bytes are written and read as work of the device's lane, which keeps the order in
    which it was enqueued; a slot is not given to another block between :meth:`find` and
    :meth:`let_go`, so that a reader has enqueued its copy before the next writer enqueues its own.

    Args:
        device: Torch device; ``"cuda:0"``.
        block_bytes: Bytes of a block.
        capacity_bytes: Hard total on the device.
        lane: Orders the copies; the device's.

    Raises:
        ConfigError: There is no such device.
        CapacityError: Not one block fits, or the device has not that much memory.
    """

    def __init__(self, device: torch.device, block_bytes: int, capacity_bytes: int, lane: Lane) -> None:
        self.device = device
        self.block_bytes = block_bytes
        self._lock = threading.Lock()
        self._lane = lane
        with lane.work():
            self._pool = TorchDevicePool(str(device), block_bytes, capacity_bytes)
        self._copies: OrderedDict[bytes, _Copy] = OrderedDict()  # oldest use first
        self._hits = 0
        self._evictions = 0

    @classmethod
    def open(cls, device: str, block_bytes: int, capacity_bytes: int) -> Self | None:
        """Open the device pool of a config; None for ``"cpu"``, and in a forked child, where CUDA is out of reach.

        Raises:
            ConfigError: There is no such device.
            CapacityError: Not one block fits, or the device has not that much memory.
        """
        if device == "cpu":
            return None
        from kvstore.l1 import streams

        place = resolve_device(device)
        lane = streams.lane_of(place) if usable(place) else None
        if lane is None:
            logger.warning("l1.device is %r, which this forked process cannot use; L1 is in host memory only", device)
            return None
        return cls(place, block_bytes, capacity_bytes, lane)

    def gauges(self) -> dict[str, int]:
        """The fields of :class:`~kvstore.l1.counters.L1Counters` that are about the device; consistent."""
        with self._lock:
            return {
                "device_capacity_blocks": self._pool.n_slots,
                "device_blocks": len(self._copies),
                "device_hits": self._hits,
                "device_evictions": self._evictions,
            }

    # -- who is here

    def find(self, entries: Sequence[Entry]) -> list[int | None]:
        """Slots of the copies of pinned entries, held until :meth:`let_go`; None where there is none."""
        with self._lock:
            copies = [self._of(entry) for entry in entries]
            for copy in reversed(copies):  # the head of a request ends up as its youngest
                if copy is not None:
                    copy.readers += 1
                    self._hits += 1
                    self._copies.move_to_end(copy.entry.digest)
        return [None if copy is None else copy.slot for copy in copies]

    def let_go(self, entries: Iterable[Entry]) -> None:
        """End the hold on entries that :meth:`find` gave slots for."""
        with self._lock:
            for entry in entries:
                copy = self._of(entry)
                if copy is not None:
                    copy.readers -= 1
                    self._drop_dead(copy)

    def reserve(self, n_blocks: int) -> list[int]:
        """Up to ``n_blocks`` slots to write into; :meth:`publish` or :meth:`release` follows."""
        slots: list[int] = []
        with self._lock:
            while len(slots) < n_blocks:
                slot = self._pool.allocate()
                slot = self._evict() if slot is None else slot
                if slot is None:
                    break
                slots.append(slot)
        return slots

    def publish(self, entries: Sequence[Entry], slots: Sequence[int]) -> None:
        """The blocks of these entries are in these slots, or will be once enqueued work has run."""
        with self._lock:
            for entry, slot in zip(reversed(entries), reversed(slots), strict=True):
                if entry.dead or entry.digest in self._copies:
                    self._pool.free(slot)
                else:
                    self._copies[entry.digest] = _Copy(entry, slot)

    def release(self, slots: Iterable[int]) -> None:
        """Give back reserved slots."""
        with self._lock:
            for slot in slots:
                self._pool.free(slot)

    def forget(self, entry: Entry) -> None:
        """An entry left L1 and is dead; its slot is free now, or when its last reader lets go."""
        with self._lock:
            copy = self._of(entry)
            if copy is not None:
                self._drop_dead(copy)

    # -- bytes, inside ``with lane.work()``

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows (n, block_bytes) into slots, whose numbers are on the device."""
        self._rows().index_copy_(0, slots, _widest(rows))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The blocks in slots as new rows (n, block_bytes)."""
        import torch

        return self._rows().index_select(0, slots).view(torch.uint8)

    def close(self) -> None:
        """Drop the memory; idempotent."""
        with self._lock:
            self._copies.clear()
            self._pool.close()

    # -- inner matters

    def _of(self, entry: Entry) -> _Copy | None:
        copy = self._copies.get(entry.digest)
        return copy if copy is not None and copy.entry is entry else None

    def _drop_dead(self, copy: _Copy) -> None:
        if copy.entry.dead and not copy.readers:
            del self._copies[copy.entry.digest]
            self._pool.free(copy.slot)

    def _evict(self) -> int | None:
        for digest, copy in self._copies.items():
            if not copy.readers:
                del self._copies[digest]
                self._evictions += 1
                return copy.slot
        return None

    def _rows(self) -> torch.Tensor:
        return _widest(self._pool.rows())


def _widest(rows: torch.Tensor) -> torch.Tensor:
    """View rows as the widest integers that fit: indexed copies work element by element."""
    import torch

    for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if rows.shape[1] % size == 0 and rows.stride(0) % size == 0:
            return rows.view(dtype)
    return rows
