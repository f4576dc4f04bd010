"""What leases and reservations have in common: slots of L1 that somebody holds for a while."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvstore.errors import ClosedError
from kvstore.l1.holding import ABANDONED, RELEASED, Held
from kvstore.l1.views import guarded_tensors

if TYPE_CHECKING:
    import torch

    from kvstore.l1.cache import L1Cache


class HeldBlocks(ABC):
    """Slots held until they are released, or until the last tensor over them dies.

    A context manager.  In a forked child it is void.
    """

    def __init__(self, l1: L1Cache, slots: Sequence[int], held: Sequence[Held]) -> None:
        self._l1 = l1
        self._slots = list(slots)
        self._tensors: tuple[torch.Tensor, ...] | None = None
        self._ended = False
        self._pid = os.getpid()
        self._holding = l1.hold(held)

    @abstractmethod
    def _gone(self, reason: str) -> str:
        """Message for a use after the end; ``reason`` is empty unless it came over a fork."""

    @property
    def blocks(self) -> int:
        """Number of blocks, a prefix of what was asked for."""
        return len(self._slots)

    def _views(self) -> tuple[torch.Tensor, ...]:
        """One tensor per block over its slot, built at first use."""
        self._check_live()
        if self._tensors is None:
            self._tensors = guarded_tensors(self._l1.pool, self._slots, self._l1.spec, self._holding)
        return self._tensors

    def release(self) -> None:
        """Give the blocks back now; idempotent, never blocks, safe in finalizers."""
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
        # With tensors built, the guards below them know better when the memory is out of use.
        holding = getattr(self, "_holding", None)
        if holding is not None and self._tensors is None and not self._ended:
            holding.drop(ABANDONED)

    def _check_live(self) -> None:
        if self._ended or os.getpid() != self._pid:
            raise ClosedError(self._gone("" if self._ended else "came over a fork"))
