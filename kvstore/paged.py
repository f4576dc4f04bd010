"""An engine's paged KV cache as the source or the destination of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import SpecMismatchError
from kvstore.spec import BlockSpec

Ids = npt.NDArray[np.int64]

_UNITS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Strip:
    """The pages of one tensor, or of one part of it that is contiguous within a block.

    Attributes:
        pages: Integers of the widest size that fits, shape ``(n_pages, ..., run)``: the last axis is
            contiguous, and a page's bytes are those of ``pages[i]`` in logical order.
        page_bytes: Bytes of one page here.
        run_bytes: Bytes of the last axis.
    """

    pages: torch.Tensor
    page_bytes: int
    run_bytes: int


class _Layers:
    """Checked layer tensors, shared by every selection of pages of them."""

    def __init__(self, layers: Sequence[torch.Tensor], block_dim: int) -> None:
        self.tensors = _checked_layers(layers)
        first = self.tensors[0]
        self.block_dim = _checked_dim(block_dim, first)
        self.device: torch.device = first.device
        self.n_pages = int(first.shape[self.block_dim])
        self.page_shape = tuple(size for dim, size in enumerate(first.shape) if dim != self.block_dim)
        self.page_bytes = math.prod(self.page_shape) * first.element_size()
        self.expanded = any(_expanded(t) for t in self.tensors)
        self.shared = len({t.data_ptr() for t in self.tensors}) < len(self.tensors)
        self._strips: dict[int, tuple[Strip, ...]] = {}

    def strips(self, before: int) -> tuple[Strip, ...]:
        """Cut each tensor along the first ``before`` axes of its pages."""
        if before not in self._strips:
            self._strips[before] = tuple(_cut(self.tensors, self.block_dim, before))
        return self._strips[before]


class PagedBlocks:
    """Blocks that lie in pages of one tensor per layer, as engines keep their KV.

    Given to :meth:`KVCache.put` as ``blocks`` or to :meth:`KVCache.get` and :meth:`KVCache.get_each`
    as ``out``.  Block ``i`` is, for each layer in order, the bytes of
    ``layer.select(block_dim, block_ids[i])`` in that page's own logical order, whatever its strides.
    That is what a :meth:`BlockSpec.opaque` of as many bytes holds, or a spec whose shape is
    ``(len(layers), *page)``: pages ``(2, N, H, D)`` make the layout ``LCND``.  Keys and values in
    tensors of their own are given as ``[k0, v0, k1, v1, ...]`` for ``LCND``.

    It only refers to the tensors: whoever passes it to a call keeps them until the call returns.
    ``put`` has read the pages when it returns; ``get`` writes into no page behind the delivered
    prefix.  On an accelerator the calling thread's current stream orders both: its earlier work is
    done before pages are read or written, and its later work sees what was written.

    Args:
        layers: One tensor per layer (or per layer and K/V): same shape, dtype and device.
        block_ids: Pages in block order: ``pages_per_block`` of them for each block.
        block_dim: The axis that counts pages, the same in every tensor.
        pages_per_block: Pages that make one block, joined along the token axis.  With an opaque spec
            each layer's pages follow one another.

    Raises:
        SpecMismatchError: Tensors that do not belong together, or a page that is not there.

    Example:
        >>> layers = [torch.zeros(2, 64, 16, 4, 8) for _ in range(3)]  # (K/V, pages, tokens, heads, dim)
        >>> len(PagedBlocks(layers, [5, 9, 2], block_dim=1))
        3
    """

    __slots__ = ("_ids", "_layers", "_pages_per_block")

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        block_ids: Sequence[int] | torch.Tensor,
        *,
        block_dim: int = 0,
        pages_per_block: int = 1,
    ) -> None:
        if type(pages_per_block) is not int or pages_per_block < 1:
            msg = f"pages_per_block is {pages_per_block!r}; expected an integer of at least 1"
            raise SpecMismatchError(msg)
        self._layers = _Layers(layers, block_dim)
        self._pages_per_block = pages_per_block
        self._ids = self._checked_ids(block_ids)

    def at(self, block_ids: Sequence[int] | torch.Tensor) -> PagedBlocks:
        """Select other pages of the same tensors, without checking those again.

        Raises:
            SpecMismatchError: A page that is not there.
        """
        other = object.__new__(PagedBlocks)
        other._layers = self._layers
        other._pages_per_block = self._pages_per_block
        other._ids = self._checked_ids(block_ids)
        return other

    def __len__(self) -> int:
        return len(self._ids) // self._pages_per_block

    def __repr__(self) -> str:
        layers = self._layers
        return (
            f"<PagedBlocks {len(self)} blocks of {self._pages_per_block} pages, {len(layers.tensors)} tensors "
            f"{tuple(layers.tensors[0].shape)} on {layers.device}>"
        )

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._layers.device

    @property
    def ids(self) -> Ids:
        """The pages in block order; not to be changed."""
        return self._ids

    @property
    def pages_per_block(self) -> int:
        """Pages that make one block."""
        return self._pages_per_block

    def strips(self, spec: BlockSpec, n_blocks: int, *, argument: str, writable: bool) -> tuple[Strip, ...]:
        """Check the pages against a spec and return what a block is made of, in order of its bytes.

        Raises:
            SpecMismatchError: Other count, size, dtype or shape, or pages that overlap when written.
        """
        layers = self._layers
        if len(self) != n_blocks:
            msg = (
                f"{argument} holds {len(self)} blocks of {self._pages_per_block} pages, but the key has {n_blocks}; "
                f"give {n_blocks * self._pages_per_block} block_ids"
            )
            raise SpecMismatchError(msg)
        nbytes = len(layers.tensors) * layers.page_bytes * self._pages_per_block
        if nbytes != spec.nbytes:
            msg = (
                f"{argument}: a block takes {nbytes} bytes ({len(layers.tensors)} tensors, {self._pages_per_block} "
                f"pages of {layers.page_bytes} bytes); the cache's spec says {spec.nbytes}: {spec.layout} {spec.shape}"
            )
            raise SpecMismatchError(msg)
        if writable:
            self._check_distinct(argument)
        before = 0 if spec.is_opaque else self._token_axis(spec, argument)
        return layers.strips(before if self._pages_per_block > 1 else 0)

    def _token_axis(self, spec: BlockSpec, argument: str) -> int:
        """Check dtype and shape; say how many axes of a page stand before its tokens."""
        tensor = self._layers.tensors[0]
        if tensor.dtype != spec.torch_dtype():
            got = str(tensor.dtype).removeprefix("torch.")
            msg = f"{argument} has pages of {got}; expected {spec.dtype}: open the cache with a spec for {got}"
            raise SpecMismatchError(msg)
        per_page = spec.block_tokens // self._pages_per_block
        axes, page = spec.axes, self._layers.page_shape
        sizes = [per_page if axis == "N" else size for axis, size in zip(axes, spec.shape, strict=True)]
        for outer in range(1, len(axes)):
            agrees = math.prod(sizes[:outer]) == len(self._layers.tensors) and _matches(page, sizes[outer:])
            if agrees and (self._pages_per_block == 1 or "N" in axes[outer:]):
                return _axes_before(page, math.prod(sizes[outer : axes.index("N")])) if "N" in axes[outer:] else 0
        msg = (
            f"{argument}: {len(self._layers.tensors)} tensors with pages of shape {page}, {self._pages_per_block} to a "
            f"block, do not make {spec.layout} {spec.shape}; expected the outer axes as tensors and the others as the "
            "page, or open the cache with BlockSpec.opaque(...)"
        )
        raise SpecMismatchError(msg)

    def _check_distinct(self, argument: str) -> None:
        if len(np.unique(self._ids)) != len(self._ids):
            values, counts = np.unique(self._ids, return_counts=True)
            msg = f"{argument} names page {values[counts > 1][0]} twice; each block needs pages of its own"
            raise SpecMismatchError(msg)
        if self._layers.expanded or self._layers.shared:
            what = "an expanded tensor" if self._layers.expanded else "one tensor twice"
            msg = f"{argument} contains {what}, so that pages share memory; pass tensors with memory of their own"
            raise SpecMismatchError(msg)

    def _checked_ids(self, block_ids: object) -> Ids:
        ids = _as_ids(block_ids)
        if len(ids) % self._pages_per_block:
            msg = f"block_ids has {len(ids)} pages; expected a multiple of pages_per_block, {self._pages_per_block}"
            raise SpecMismatchError(msg)
        n_pages = self._layers.n_pages
        wrong = (ids < 0) | (ids >= n_pages)
        if wrong.any():
            at = int(wrong.argmax())
            msg = f"block_ids[{at}] is {ids[at]}; expected a page from 0 to {n_pages - 1}"
            raise SpecMismatchError(msg)
        return ids


def _as_ids(block_ids: object) -> Ids:
    values: Any = block_ids
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    ids = np.asarray(values)
    if ids.size == 0 and ids.ndim == 1:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        msg = f"block_ids is {ids.dtype} of shape {ids.shape}; expected a flat sequence of page numbers"
        raise SpecMismatchError(msg)
    return ids.astype(np.int64)  # a copy: the caller may reuse its own


def _checked_layers(layers: object) -> tuple[torch.Tensor, ...]:
    if isinstance(layers, torch.Tensor) or not isinstance(layers, Sequence) or not layers:
        got = f"a {type(layers).__name__}" if not isinstance(layers, Sequence) else "empty"
        msg = f"layers is {got}; expected a sequence of one tensor per layer"
        raise SpecMismatchError(msg)
    first = layers[0]
    for i, layer in enumerate(layers):
        if not isinstance(layer, torch.Tensor):
            msg = f"layers[{i}] is a {type(layer).__name__}; expected a torch.Tensor"
            raise SpecMismatchError(msg)
        kinds = [(tuple(t.shape), t.dtype, t.device) for t in (layer, first)]
        if kinds[0] != kinds[1]:
            (got, expected) = (" ".join(map(str, kind)) for kind in kinds)
            msg = f"layers[{i}] is {got}, layers[0] {expected}; all layers must agree: store KV groups apart"
            raise SpecMismatchError(msg)
    return tuple(layer.detach() for layer in layers)


def _checked_dim(block_dim: object, layer: torch.Tensor) -> int:
    if isinstance(block_dim, bool) or not isinstance(block_dim, int) or not -layer.ndim <= block_dim < layer.ndim:
        msg = f"block_dim is {block_dim!r}; expected an axis of layers of shape {tuple(layer.shape)}"
        raise SpecMismatchError(msg)
    if layer.ndim == 1:
        msg = f"layers have shape {tuple(layer.shape)}; expected pages and at least one axis within a page"
        raise SpecMismatchError(msg)
    return block_dim % layer.ndim


def _expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _matches(page: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether two shapes are alike but for axes of size 1."""
    return [size for size in page if size != 1] == [size for size in sizes if size != 1]


def _axes_before(page: Sequence[int], product: int) -> int:
    """How many leading axes of a page multiply to ``product``: those that stand before its tokens."""
    before, seen = 0, 1
    while seen < product:
        seen *= page[before]
        before += 1
    return before


def _cut(tensors: Sequence[torch.Tensor], block_dim: int, before: int) -> list[Strip]:
    strips = []
    for tensor in tensors:
        parts = [tensor.movedim(block_dim, 0)]
        for _ in range(before):
            parts = [part for whole in parts for part in whole.unbind(1)]
        strips += [strip_of(part) for part in parts]
    return strips


def strip_of(pages: torch.Tensor) -> Strip:
    """View pages ``(n, ...)`` as integers whose last axis is the longest contiguous run."""
    itemsize = pages.element_size()
    run = 1
    axes: list[tuple[int, int]] = []
    for size, stride in zip(reversed(pages.shape[1:]), reversed(pages.stride()[1:]), strict=True):
        if size == 1:
            continue
        if not axes and stride == run:
            run *= size
        else:
            axes.append((size, stride))
    sizes = [pages.shape[0], *(size for size, _ in reversed(axes)), run]
    strides = [pages.stride()[0], *(stride for _, stride in reversed(axes)), 1]
    offset = pages.storage_offset()
    in_bytes = [run * itemsize, offset * itemsize, pages.data_ptr(), *(s * itemsize for s in strides[:-1])]
    unit = next(width for width in _UNITS if all(value % width == 0 for value in in_bytes))
    view = torch.empty(0, dtype=_UNITS[unit], device=pages.device)
    view.set_(
        pages.untyped_storage(),
        offset * itemsize // unit,
        [*sizes[:-1], run * itemsize // unit],
        [*(s * itemsize // unit for s in strides[:-1]), 1],
    )
    return Strip(view, math.prod(pages.shape[1:]) * itemsize, run * itemsize)
