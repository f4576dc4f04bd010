"""Writable blocks in L1 that become resident on commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.l1.entry import Entry
from kvstore.l1.held_blocks import HeldBlocks
from kvstore.l1.index import BlockId

if TYPE_CHECKING:
    import torch

    from kvstore.l1.cache import L1Cache


class Reservation(HeldBlocks):
    """Slots to compute blocks into, so that a put copies nothing.

    Nobody else sees the blocks before :meth:`commit`.  Leaving the ``with`` block without commit
    discards them; a reservation that is dropped gives each slot back when the last tensor or view
    over it dies.  After commit or exit the tensors are invalid: writing into them would change
    published or foreign blocks.  In a forked child a reservation is void.

    Args:
        l1: Where the slots are; its spec is the tensors'.
        items: Digest and parent of each block, in key order.
        slots: Reserved slots for the first ``len(slots)`` items.
        on_commit: Called by :meth:`commit` with the published entries, pinned for the time of the
            call and without any lock, to queue them for L2.
    """

    def __init__(
        self,
        l1: L1Cache,
        items: Sequence[BlockId],
        slots: Sequence[int],
        *,
        on_commit: Callable[[list[Entry]], None] | None = None,
    ) -> None:
        super().__init__(l1, slots, slots)
        self._items = list(items[: len(slots)])
        self._on_commit = on_commit

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """One writable tensor per block: ``spec.shape``, ``spec.dtype``, arbitrary content.

        Raises:
            ClosedError: The reservation was committed or discarded, or came over a fork.
        """
        return self._views()

    def commit(self, n_blocks: int | None = None) -> int:
        """Publish the first ``n_blocks`` blocks (all by default) and discard the rest.

        Returns:
            Blocks published; a later eviction may take them at any time.

        Raises:
            ValueError: More blocks than there are; nothing happened.
            ClosedError: It was committed or discarded before, or came over a fork.
        """
        self._check_live()
        wanted = self.blocks if n_blocks is None else n_blocks
        if not 0 <= wanted <= self.blocks:
            msg = f"commit got n_blocks={n_blocks}; expected 0 to {self.blocks}, the blocks of this reservation"
            raise ValueError(msg)
        slots = [held for held in self._l1.claim(self._holding) if isinstance(held, int)]
        self._ended = True
        self._tensors = None
        if len(slots) < self.blocks:  # another thread discarded it meanwhile
            self._l1.release_slots(slots)
            self._check_live()
        self._l1.release_slots(slots[wanted:])
        entries = self._l1.publish(self._items[:wanted], slots[:wanted], pins=1)
        try:
            if self._on_commit is not None:
                self._on_commit(entries)
        finally:
            self._l1.unpin(entries)
        return len(entries)

    def _gone(self, reason: str) -> str:
        return f"this reservation {reason or 'was committed or discarded'}; allocate again"
