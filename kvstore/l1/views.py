"""Tensors over L1 slots that say when nobody looks at them any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.l1.holding import Holding
from kvstore.l1.pool import SlabPool
from kvstore.spec import BlockSpec

if TYPE_CHECKING:
    import torch


class GuardedBlock(np.ndarray[tuple[int, ...], np.dtype[np.uint8]]):
    """A block's bytes as an array that tells its holding when it dies.

    ``torch.from_numpy`` keeps the array alive with the tensor's storage, hence with every view of
    that tensor; so the array's end is the end of the last view.
    """

    holding: Holding | None = None
    position = 0

    def __del__(self) -> None:
        if self.holding is not None:
            self.holding.drop(self.position)


def guarded_tensors(
    pool: SlabPool, slots: Sequence[int], spec: BlockSpec, holding: Holding
) -> tuple[torch.Tensor, ...]:
    """Build one zero-copy tensor per slot.

    Args:
        pool: Holds the bytes; they stay mapped as long as a tensor looks at them.
        slots: Slots, in the order of the holding's items.
        spec: The blocks' shape and dtype; opaque blocks become uint8 of shape ``(nbytes,)``.
        holding: Told the position of each block whose last view died.

    Returns:
        Tensors of shape ``spec.shape`` and dtype ``spec.torch_dtype()``, writable.
    """
    import torch

    # numpy has no bfloat16 or float8: take bytes, the last axis longer, and let torch see the dtype
    shape = (*spec.shape[:-1], spec.shape[-1] * spec.itemsize)
    dtype = spec.torch_dtype()
    guards = [GuardedBlock(shape, np.dtype(np.uint8), pool.payload(slot)) for slot in slots]
    tensors = tuple(torch.from_numpy(guard).view(dtype) for guard in guards)
    for position, guard in enumerate(guards):  # armed only when all are there: an error drops nothing
        guard.holding, guard.position = holding, position
    return tensors
