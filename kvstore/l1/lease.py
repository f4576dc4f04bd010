"""Zero-copy access to blocks in L1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvstore.errors import ClosedError
from kvstore.l1.cache import L1Cache
from kvstore.l1.entry import Entry
from kvstore.l1.holding import ABANDONED, RELEASED
from kvstore.l1.views import guarded_tensors
from kvstore.spec import BlockSpec

if TYPE_CHECKING:
    import torch


class Lease:
    """Pinned blocks, readable in place until they are released.

    While a lease holds a block, its bytes neither move nor change, also when the block is deleted
    or the cache cleared.  Release it (or leave its ``with`` block) and its tensors are invalid at
    once: their memory goes to other blocks.  A lease that is dropped without release comes back
    block by block when the last tensor or view over the block dies, which is counted.  Never write
    into the tensors: other leases and queued writes see the same bytes.  In a forked child a lease
    is void.

    Args:
        l1: Where the blocks are.
        entries: Blocks in key order, each with one pin that becomes the lease's.
        spec: Shape and dtype of the tensors.
    """

    def __init__(self, l1: L1Cache, entries: Sequence[Entry], spec: BlockSpec) -> None:
        self._l1 = l1
        self._spec = spec
        self._slots = [entry.slot for entry in entries]
        self._tensors: tuple[torch.Tensor, ...] | None = None
        self._released = False
        self._pid = os.getpid()
        self._holding = l1.hold(entries)

    @property
    def blocks(self) -> int:
        """Number of blocks, the length of the prefix that was found."""
        return len(self._slots)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """One tensor per block: ``spec.shape``, ``spec.dtype``, zero-copy; built at first access.

        Raises:
            ClosedError: The lease was released, or came over a fork.
        """
        if self._released or os.getpid() != self._pid:
            reason = "was released" if self._released else "came over a fork"
            msg = f"this lease {reason}, its memory belongs to other blocks; acquire the key again"
            raise ClosedError(msg)
        if self._tensors is None:
            self._tensors = guarded_tensors(self._l1.pool, self._slots, self._spec, self._holding)
        return self._tensors

    def release(self) -> None:
        """Give the blocks back now; idempotent, never blocks, safe in finalizers."""
        if self._released:
            return
        self._released = True
        self._holding.drop(RELEASED)
        self._l1.tidy()
        self._tensors = None

    def __len__(self) -> int:
        return len(self._slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # With tensors built, the guards below them know better when the memory is out of use.
        holding = getattr(self, "_holding", None)
        if holding is not None and self._tensors is None and not self._released:
            holding.drop(ABANDONED)
