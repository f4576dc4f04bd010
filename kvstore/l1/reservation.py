"""Writable blocks in L1 that become resident on commit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvstore.errors import ClosedError
from kvstore.l1.cache import L1Cache
from kvstore.l1.entry import Entry
from kvstore.l1.holding import ABANDONED, RELEASED
from kvstore.l1.index import BlockId
from kvstore.l1.views import guarded_tensors

if TYPE_CHECKING:
    import torch


class Reservation:
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
        self._l1 = l1
        self._items = list(items[: len(slots)])
        self._slots = list(slots)
        self._on_commit = on_commit
        self._tensors: tuple[torch.Tensor, ...] | None = None
        self._ended = False
        self._pid = os.getpid()
        self._holding = l1.hold(slots)

    @property
    def blocks(self) -> int:
        """Number of blocks there was room for; a prefix of what was asked for."""
        return len(self._slots)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """One writable tensor per block: ``spec.shape``, ``spec.dtype``, arbitrary content.

        Raises:
            ClosedError: The reservation was committed or discarded, or came over a fork.
        """
        self._check_live()
        if self._tensors is None:
            self._tensors = guarded_tensors(self._l1.pool, self._slots, self._l1.spec, self._holding)
        return self._tensors

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

    def release(self) -> None:
        """Discard what was not committed; idempotent, never blocks, safe in finalizers."""
        if self._ended:
            return
        self._ended = True
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
        holding = getattr(self, "_holding", None)
        if holding is not None and self._tensors is None and not self._ended:
            holding.drop(ABANDONED)

    def _check_live(self) -> None:
        if self._ended or os.getpid() != self._pid:
            reason = "was committed or discarded" if self._ended else "came over a fork"
            msg = f"this reservation {reason}; allocate again"
            raise ClosedError(msg)
