"""Zero-copy access to blocks in L1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.l1.entry import Entry
from kvstore.l1.held_blocks import HeldBlocks

if TYPE_CHECKING:
    import torch

    from kvstore.l1.cache import L1Cache


class Lease(HeldBlocks):
    """Pinned blocks, readable in place until they are released.

    While a lease holds a block, its bytes neither move nor change, also when the block is deleted
    or the cache cleared.  Release it (or leave its ``with`` block) and its tensors are invalid at
    once: their memory goes to other blocks.  A lease that is dropped without release comes back
    block by block when the last tensor or view over the block dies, which is counted.  Never write
    into the tensors: other leases and queued writes see the same bytes.  In a forked child a lease
    is void.

    Args:
        l1: Where the blocks are; its spec is the tensors'.
        entries: Blocks in key order, each with one pin that becomes the lease's.
    """

    def __init__(self, l1: L1Cache, entries: Sequence[Entry]) -> None:
        super().__init__(l1, [entry.slot for entry in entries], entries)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """One tensor per block: ``spec.shape``, ``spec.dtype``, zero-copy; built at first access.

        Raises:
            ClosedError: The lease was released, or came over a fork.
        """
        return self._views()

    def _gone(self, reason: str) -> str:
        return f"this lease {reason or 'was released'}, its memory belongs to other blocks; acquire the key again"
