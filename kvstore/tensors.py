"""Callers' tensors as rows of bytes: where blocks come from and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import SpecMismatchError
from kvstore.spec import BlockSpec

Bytes = npt.NDArray[np.uint8]
Blocks = torch.Tensor | Sequence[torch.Tensor]
"""``n`` blocks: a tensor ``(n, *spec.shape)`` of spec.dtype, or a sequence of ``n`` tensors."""


class Rows(Protocol):
    """``n`` blocks of a caller, addressed by index."""

    def __len__(self) -> int: ...

    def copy_to(self, i: int, slot: Bytes) -> None:
        """Copy block ``i`` into ``slot`` (nbytes)."""

    def target(self, i: int) -> Bytes:
        """Writable bytes for block ``i``; :meth:`commit` follows."""

    def commit(self, i: int) -> None:
        """Block ``i`` is complete in its :meth:`target`."""


class _DenseRows:
    """Contiguous host memory: rows are views of the caller's bytes."""

    def __init__(self, rows: Sequence[Bytes]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def copy_to(self, i: int, slot: Bytes) -> None:
        np.copyto(slot, self._rows[i])

    def target(self, i: int) -> Bytes:
        return self._rows[i]

    def commit(self, i: int) -> None:
        """Nothing to do: the target is the caller's memory."""


class _StridedRows:
    """Tensors with gaps, other strides or on a device: bytes go through torch."""

    def __init__(self, tensors: Sequence[torch.Tensor], spec: BlockSpec) -> None:
        self._tensors = tensors
        self._spec = spec
        self._scratch: Bytes | None = None

    def __len__(self) -> int:
        return len(self._tensors)

    def _view(self, data: Bytes) -> torch.Tensor:
        return torch.from_numpy(data).view(self._spec.torch_dtype()).view(self._spec.shape)

    def copy_to(self, i: int, slot: Bytes) -> None:
        self._view(slot).copy_(self._tensors[i])

    def target(self, i: int) -> Bytes:
        del i
        if self._scratch is None:
            self._scratch = np.empty(self._spec.nbytes, np.uint8)
        return self._scratch

    def commit(self, i: int) -> None:
        if self._scratch is not None:
            self._tensors[i].copy_(self._view(self._scratch))


def rows_of(blocks: Blocks, spec: BlockSpec, n_blocks: int, *, argument: str, writable: bool = False) -> Rows:
    """Check a caller's blocks against the spec and return them as rows.

    Args:
        blocks: ``(n_blocks, *spec.shape)`` or a sequence of ``n_blocks`` tensors of spec.shape.
        spec: What a block must look like.
        n_blocks: How many blocks the key has.
        argument: Name of the argument, for messages.
        writable: The rows will be written to.

    Raises:
        SpecMismatchError: Wrong type, count, shape or dtype, or memory that overlaps itself.
    """
    if isinstance(blocks, torch.Tensor):
        expected = (n_blocks, *spec.shape)
        _check(blocks, expected, spec, argument)
        whole = blocks.detach()
        if writable:
            _check_owned(whole, argument)
        if whole.device.type == "cpu" and whole.is_contiguous():
            return _DenseRows(list(_bytes_of(whole, spec).reshape(n_blocks, spec.nbytes)))
        tensors: Sequence[torch.Tensor] = whole.unbind(0)
    else:
        if not isinstance(blocks, Sequence):
            msg = (
                f"{argument} is a {type(blocks).__name__}; expected a tensor (n, *spec.shape) or a sequence of tensors"
            )
            raise SpecMismatchError(msg)
        if len(blocks) != n_blocks:
            msg = (
                f"{argument} holds {len(blocks)} tensors, but the key has {n_blocks} blocks; give one tensor per block"
            )
            raise SpecMismatchError(msg)
        for i, block in enumerate(blocks):
            _check(block, spec.shape, spec, f"{argument}[{i}]")
        tensors = [block.detach() for block in blocks]
        if writable:
            for tensor in tensors:
                _check_owned(tensor, argument)
        if all(t.device.type == "cpu" and t.is_contiguous() for t in tensors):
            return _DenseRows([_bytes_of(t, spec) for t in tensors])
    return _StridedRows(tensors, spec)


def _bytes_of(tensor: torch.Tensor, spec: BlockSpec) -> Bytes:
    """The bytes of a contiguous host tensor, flat and sharing its memory."""
    flat = tensor.reshape(-1)
    raw = flat if spec.itemsize == 1 and flat.dtype == torch.uint8 else flat.view(torch.uint8)
    return raw.numpy()


def _check(tensor: object, shape: tuple[int, ...], spec: BlockSpec, argument: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        msg = f"{argument} is a {type(tensor).__name__}; expected a torch.Tensor of shape {shape}"
        raise SpecMismatchError(msg)
    if tuple(tensor.shape) != shape:
        msg = (
            f"{argument} has shape {tuple(tensor.shape)}; expected {shape}: blocks first, then the axes of the "
            f"spec's layout {spec.layout}"
        )
        raise SpecMismatchError(msg)
    if tensor.dtype != spec.torch_dtype():
        got = str(tensor.dtype).removeprefix("torch.")
        msg = f"{argument} has dtype {got}; expected {spec.dtype}: convert it, or open the cache with a spec for {got}"
        raise SpecMismatchError(msg)


def _check_owned(tensor: torch.Tensor, argument: str) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        msg = f"{argument} is an expanded tensor whose elements share memory; pass one with memory of its own"
        raise SpecMismatchError(msg)
