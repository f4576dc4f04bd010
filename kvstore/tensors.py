"""Callers' tensors as rows of bytes: where blocks come from and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import SpecMismatchError
from kvstore.l1 import streams
from kvstore.paged import PagedBlocks, Strip, strip_of
from kvstore.paged_device import DeviceRows, StripPages, TensorPages
from kvstore.paged_rows import PagedRows
from kvstore.spec import BlockSpec

Bytes = npt.NDArray[np.uint8]
Blocks = torch.Tensor | Sequence[torch.Tensor] | PagedBlocks
"""``n`` blocks: a tensor ``(n, *spec.shape)`` of spec.dtype, a sequence of ``n`` tensors, or pages of an engine."""


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of each element size, since numpy has no bfloat16."""


class Rows(Protocol):
    """``n`` blocks of a caller, addressed by index."""

    def __len__(self) -> int: ...

    def copy_to(self, i: int, slot: Bytes) -> None:
        """Copy block ``i`` into ``slot`` (nbytes)."""

    def copy_each_to(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy ``blocks`` into as many ``slots``."""

    def fill(self, i: int, data: Bytes) -> None:
        """Copy ``data`` (nbytes) into block ``i``, at the latest at :meth:`finish`; ``data`` is free on return."""

    def fill_each(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """Copy ``data`` into as many ``blocks``, like :meth:`fill`."""

    def target(self, i: int) -> Bytes:
        """Writable bytes for block ``i``; :meth:`commit` follows."""

    def commit(self, i: int) -> None:
        """Block ``i`` is complete in its :meth:`target`."""

    def finish(self) -> None:
        """Nothing more will be filled or committed; the caller's next work on its memory sees all of it."""


class _DenseRows:
    """Contiguous host memory: rows are views of the caller's bytes."""

    def __init__(self, rows: Sequence[Bytes]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def copy_to(self, i: int, slot: Bytes) -> None:
        np.copyto(slot, self._rows[i])

    def copy_each_to(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        for i, slot in zip(blocks, slots, strict=True):
            np.copyto(slot, self._rows[i])

    def fill(self, i: int, data: Bytes) -> None:
        np.copyto(self._rows[i], data)

    def fill_each(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        for i, block in zip(blocks, data, strict=True):
            np.copyto(self._rows[i], block)

    def target(self, i: int) -> Bytes:
        return self._rows[i]

    def commit(self, i: int) -> None:
        """Nothing to do: the target is the caller's memory."""

    def finish(self) -> None:
        """Nothing to do."""


class _StridedRows:
    """Tensors with gaps or other strides, or on several devices: bytes go through torch."""

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

    def copy_each_to(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        for i, slot in zip(blocks, slots, strict=True):
            self.copy_to(i, slot)

    def fill(self, i: int, data: Bytes) -> None:
        tensor = self._tensors[i]
        if tensor.device.type == "cpu":  # by numpy: torch makes no tensor of memory that is read only, as a map is
            array = tensor.view(_INTEGERS[self._spec.itemsize]).numpy()
            np.copyto(array, data.view(array.dtype).reshape(array.shape))
            return
        np.copyto(self.target(i), data)
        self.commit(i)

    def fill_each(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        for i, block in zip(blocks, data, strict=True):
            self.fill(i, block)

    def target(self, i: int) -> Bytes:
        del i
        if self._scratch is None:
            self._scratch = np.empty(self._spec.nbytes, np.uint8)
        return self._scratch

    def commit(self, i: int) -> None:
        if self._scratch is not None:
            self._tensors[i].copy_(self._view(self._scratch))

    def finish(self) -> None:
        """Nothing to do."""


def rows_of(blocks: Blocks, spec: BlockSpec, n_blocks: int, *, argument: str, writable: bool = False) -> Rows:
    """Check a caller's blocks against the spec and return them as rows.

    Args:
        blocks: ``(n_blocks, *spec.shape)``, a sequence of ``n_blocks`` tensors of spec.shape, or pages.
        spec: What a block must look like.
        n_blocks: How many blocks the key has.
        argument: Name of the argument, for messages.
        writable: The rows will be written to.

    Raises:
        SpecMismatchError: Wrong type, count, shape or dtype, or memory that overlaps itself.
    """
    if isinstance(blocks, PagedBlocks):
        return _paged_rows(blocks, blocks.strips(spec, n_blocks, argument=argument, writable=writable), spec)
    if isinstance(blocks, torch.Tensor):
        _check(blocks, (n_blocks, *spec.shape), spec, argument)
        tensors: Sequence[torch.Tensor] = (blocks.detach(),)
    else:
        tensors = _listed(blocks, spec, n_blocks, argument)
    if writable:
        for tensor in tensors:
            _check_owned(tensor, argument)
    if isinstance(blocks, torch.Tensor):
        return _rows_of_one(tensors[0], spec)
    return _rows_of_each(tensors, spec)


def _paged_rows(paged: PagedBlocks, strips: Sequence[Strip], spec: BlockSpec) -> Rows:
    lane = streams.lane_of(paged.device)
    if lane is None:
        return PagedRows(paged, strips, spec)
    ids = paged.ids.reshape(len(paged), paged.pages_per_block)
    return DeviceRows(StripPages(strips, ids, lane), len(paged), spec.nbytes, lane)


def _rows_of_one(whole: torch.Tensor, spec: BlockSpec) -> Rows:
    n_blocks, lane = len(whole), streams.lane_of(whole.device)
    if lane is not None:
        pages = StripPages([strip_of(whole)], np.arange(n_blocks).reshape(n_blocks, 1), lane)
        return DeviceRows(pages, n_blocks, spec.nbytes, lane)
    if whole.is_contiguous():
        return _DenseRows(list(_bytes_of(whole, spec).reshape(n_blocks, spec.nbytes)))
    return _StridedRows(whole.unbind(0), spec)


def _rows_of_each(tensors: Sequence[torch.Tensor], spec: BlockSpec) -> Rows:
    devices = {tensor.device for tensor in tensors}
    lane = streams.lane_of(devices.pop()) if len(devices) == 1 else None
    if lane is not None:
        return DeviceRows(TensorPages(tensors, spec), len(tensors), spec.nbytes, lane)
    if all(t.device.type == "cpu" and t.is_contiguous() for t in tensors):
        return _DenseRows([_bytes_of(t, spec) for t in tensors])
    return _StridedRows(tensors, spec)


def _listed(blocks: object, spec: BlockSpec, n_blocks: int, argument: str) -> Sequence[torch.Tensor]:
    """Check a sequence of one tensor per block."""
    if not isinstance(blocks, Sequence):
        msg = (
            f"{argument} is a {type(blocks).__name__}; expected a tensor (n, *spec.shape), a sequence of tensors "
            "or PagedBlocks"
        )
        raise SpecMismatchError(msg)
    if len(blocks) != n_blocks:
        msg = f"{argument} holds {len(blocks)} tensors, but the key has {n_blocks} blocks; give one tensor per block"
        raise SpecMismatchError(msg)
    for i, block in enumerate(blocks):
        _check(block, spec.shape, spec, f"{argument}[{i}]")
    return [block.detach() for block in blocks]


def staging_rows(memory: Bytes) -> Rows:
    """Rows over contiguous memory of the cache, ``(n_blocks, nbytes)``."""
    return _DenseRows(list(memory))


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
