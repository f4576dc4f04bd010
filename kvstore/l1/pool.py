"""The host slab: block slots in one private anonymous mapping."""

from __future__ import annotations

import contextlib
import logging
import mmap
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import ClosedError, ConfigError
from kvstore.l1 import pinned
from kvstore.l1.device import BlockPool, count_slots
from kvstore.l1.limits import check_capacity, memory_limits

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

HEADER_BYTES: Final = 4096
"""Room in front of each block for a record's head; it ends where the block begins."""

_PAGE_BYTES: Final = 4096
_HUGE_PAGE_BYTES: Final = 2 << 20  # 2 MiB, the huge page of x86-64 and of arm64 with 4 KiB pages
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; <linux/mman.h>, not in the mmap module
_POPULATE_CHUNK_BYTES: Final = 64 << 20  # madvise holds the GIL: let other threads run in between


class SlabPool(BlockPool[npt.NDArray[np.uint8]]):
    """Block slots in host memory; a hard budget, header pages included.

    The mapping is private (a forked child gets copies on write and never writes into its parent's
    blocks), starts on a 2 MiB boundary and asks for huge pages.  Slot ``i`` is a header page and
    then the block, so that a record's head and an uncompressed payload are contiguous.  Memory is
    taken from the system when a slot is first written, not when the pool opens.

    Args:
        block_bytes: Bytes of one block, at least 1.
        capacity_bytes: Hard total in bytes; ``n_slots * stride`` never exceeds it.
        populate: Touch all memory now, so that no put pays page faults later (Linux 5.14 or later;
            elsewhere it does nothing).

    Raises:
        CapacityError: Not even one slot fits.
        ConfigError: More memory than this process may have; names the option and both numbers.

    Attributes:
        pinned_bytes: Bytes that are page-locked for an accelerator.
        pin_refusals: How often the system refused that.
    """

    def __init__(self, block_bytes: int, capacity_bytes: int, *, populate: bool = False) -> None:
        check_capacity(capacity_bytes, memory_limits())
        self.stride = HEADER_BYTES + -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES
        super().__init__(block_bytes, count_slots(capacity_bytes, self.stride))
        self.capacity_bytes = capacity_bytes
        self.pinned_bytes = 0
        self.pin_refusals = 0
        used_bytes = self.n_slots * self.stride
        try:
            memory = mmap.mmap(-1, used_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            msg = f"l1.capacity is {capacity_bytes} bytes, which this host refused to map ({e}); lower l1.capacity"
            raise ConfigError(msg) from e
        whole = np.frombuffer(memory, np.uint8)
        start = -int(whole.__array_interface__["data"][0]) % _HUGE_PAGE_BYTES
        _advise_huge_pages(memory, start, used_bytes)
        if populate:
            _populate(memory, start, used_bytes)
        self._map: mmap.mmap | None = memory
        self._slab = whole[start : start + used_bytes]
        self._payloads: list[npt.NDArray[np.uint8] | None] = [None] * self.n_slots

    def payload(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the block's bytes, zero-copy and writable: shape ``(block_bytes,)``, uint8."""
        payload = self._payloads[slot]
        if payload is None:
            self._check_open()
            begin = slot * self.stride + HEADER_BYTES
            payload = self._payloads[slot] = self._slab[begin : begin + self.block_bytes]
        return payload

    def view(self, slot: int) -> memoryview:
        """Return the whole slot: header page, block, padding; ``stride`` writable bytes."""
        self._check_open()
        return self._slab[slot * self.stride : (slot + 1) * self.stride].data

    def frame(self, slot: int) -> memoryview:
        """Return header page and block, which end together; ``HEADER_BYTES + block_bytes`` writable bytes."""
        return self.view(slot)[: HEADER_BYTES + self.block_bytes]

    def pin(self) -> None:
        """Page-lock the slots for an accelerator, or count that the system refuses it."""
        self._check_open()
        if pinned.pin(self._address(), self._slab.nbytes):
            self.pinned_bytes = self._slab.nbytes
        else:
            self.pin_refusals += 1

    def copy_in(self, slot: int, source: torch.Tensor) -> None:
        """Copy ``source`` into the slot."""
        import torch

        if source.device.type == "cpu":
            np.copyto(self.payload(slot), source.numpy())  # faster than Tensor.copy_ on host memory
        else:
            torch.from_numpy(self.payload(slot)).copy_(source)

    def copy_out(self, slot: int, target: torch.Tensor) -> None:
        """Copy the slot's block into ``target``."""
        import torch

        if target.device.type == "cpu":
            np.copyto(target.numpy(), self.payload(slot))
        else:
            target.copy_(torch.from_numpy(self.payload(slot)))

    def close(self) -> None:
        """Unmap, or leave that to the last tensor or array that looks at the slab; idempotent."""
        memory, self._map = self._map, None
        if memory is None:
            return
        if self.pinned_bytes:  # no copy of a device is under way: each call waits for its own
            pinned.unpin(self._address())
            self.pinned_bytes = 0
        self._payloads = [None] * self.n_slots
        self._slab = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # in use: the mapping goes with its last user
            memory.close()

    def _address(self) -> int:
        return int(self._slab.__array_interface__["data"][0])

    def _check_open(self) -> None:
        if self._map is None:
            msg = "the L1 pool is closed; open a cache again to use it"
            raise ClosedError(msg)


def _advise_huge_pages(memory: mmap.mmap, start: int, used_bytes: int) -> None:
    # Whole huge pages of the budget only: one across its end would exceed the hard total.
    length = used_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or not length:
        return
    try:
        memory.madvise(advice, start, length)
    except OSError as e:  # a kernel without transparent huge pages: slower, not wrong
        logger.debug("no huge pages for the L1 slab: %s", e)


def _populate(memory: mmap.mmap, start: int, used_bytes: int) -> None:
    for offset in range(0, used_bytes, _POPULATE_CHUNK_BYTES):
        length = min(_POPULATE_CHUNK_BYTES, used_bytes - offset)
        try:
            memory.madvise(_MADV_POPULATE_WRITE, start + offset, length)
        except OSError as e:
            logger.debug("the L1 slab is populated on first use instead: %s", e)
            return
