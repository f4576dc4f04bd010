"""Where the blocks lie in vLLM's KV tensors: found from their shapes, or refused with a reason."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.errors import NotSupportedError
from kvstore.paged import PagedBlocks
from kvstore.spec import BlockSpec, dtype_name

_PAGE_AXES = 3  # heads, tokens, content


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """What vLLM says about its blocks.

    Attributes:
        n_blocks: Blocks in the KV cache.
        block_tokens: Tokens per block.
        blocks_first: Whether tensors are known to be ``[blocks, heads, tokens, content]`` views, as since
            vLLM 0.32, whatever their strides.
    """

    n_blocks: int
    block_tokens: int
    blocks_first: bool = False


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The KV tensors of one worker, in the order of their layers.

    Attributes:
        layers: One tensor per layer that has memory of its own.
        index_of: Place in ``layers`` by layer name; layers that share their KV have the same place.
        block_dim: Axis that counts pages.
        pages_per_block: Pages that make one block.
        spec: One block: all layers of it.
    """

    layers: tuple[torch.Tensor, ...]
    index_of: Mapping[str, int]
    block_dim: int
    pages_per_block: int
    spec: BlockSpec

    @property
    def by_layer(self) -> bool:
        """Whether a block can be moved layer by layer."""
        return self.pages_per_block == 1 and self.spec.axes.startswith("L")

    def pages(self) -> PagedBlocks:
        """A selection of no pages, to select others from with ``at``."""
        return PagedBlocks(self.layers, (), block_dim=self.block_dim, pages_per_block=self.pages_per_block)

    def page_ids(self, block_ids: Sequence[int]) -> Sequence[int]:
        """The pages of blocks: a block of ``k`` pages ``b`` is the pages ``k*b .. k*b + k-1``."""
        k = self.pages_per_block
        return block_ids if k == 1 else [k * block + i for block in block_ids for i in range(k)]

    def layer_rows(self, index: int) -> torch.Tensor:
        """One layer as ``(blocks, *page)``: a view; only where ``by_layer``."""
        return self.layers[index].movedim(self.block_dim, 0)


def find_pages(shape: Sequence[int], geometry: BlockGeometry) -> tuple[int, int]:
    """Find the axis that counts pages, and how many pages make a block.

    An attention kernel may use smaller blocks than vLLM's block table; then a block is several pages.
    The sizes must leave exactly one possibility, unless vLLM says what the axes are.

    Args:
        shape: Shape of one layer's KV tensor.
        geometry: What vLLM says.

    Returns:
        Axis and pages per block.

    Raises:
        NotSupportedError: No axis, or more than one, can be the blocks.
    """
    n, tokens = geometry.n_blocks, geometry.block_tokens
    if geometry.blocks_first and len(shape) == _PAGE_AXES + 1 and shape[0] == n and shape[2] == tokens:
        return 0, 1
    found = {
        (axis, size // n)
        for axis, size in enumerate(shape)
        if size % n == 0
        and size
        and tokens % (size // n) == 0
        and any(other == tokens // (size // n) for j, other in enumerate(shape) if j != axis)
    }
    if len(found) == 1:
        return found.pop()
    why = "no axis counts them" if not found else f"axes {sorted({axis for axis, _ in found})} both could"
    raise NotSupportedError(
        f"a KV tensor of shape {tuple(shape)} for {n} blocks of {tokens} tokens: {why}; the connector does not "
        "guess. Use another number of blocks (num_gpu_blocks_override) or another attention backend, and report it"
    )


def layer_pages(kv_caches: Mapping[str, torch.Tensor], geometry: BlockGeometry) -> LayerPages:
    """Describe the KV tensors that vLLM registered.

    Raises:
        NotSupportedError: There are none, the blocks cannot be found, or layers differ in shape or dtype.
    """
    if not kv_caches:
        raise NotSupportedError("vLLM registered no KV tensors; the connector has nothing to store")
    layers, index_of = _distinct(kv_caches)
    first = layers[0]
    for name, index in index_of.items():
        layer = layers[index]
        if (layer.shape, layer.dtype, layer.device) != (first.shape, first.dtype, first.device):
            raise NotSupportedError(
                f"KV tensors differ: {name} is {_named(layer)}, the first layer {_named(first)}; models whose layers "
                "keep different KV are not supported by the connector: use the tier (OffloadingConnector)"
            )
    block_dim, pages_per_block = find_pages(first.shape, geometry)
    page = [size for axis, size in enumerate(first.shape) if axis != block_dim]
    spec = _spec_of(page, len(layers), first.dtype, geometry.block_tokens, pages_per_block)
    return LayerPages(layers, index_of, block_dim, pages_per_block, spec)


def _distinct(kv_caches: Mapping[str, torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """Tensors with memory of their own, in the order of their layers' numbers."""
    layers: list[torch.Tensor] = []
    index_of: dict[str, int] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for name in sorted(kv_caches, key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name)):
        tensor = kv_caches[name]
        if not isinstance(tensor, torch.Tensor):
            raise NotSupportedError(
                f"the KV of {name} is a {type(tensor).__name__}; expected one tensor per layer: "
                "models with recurrent state are not supported by the connector"
            )
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if memory not in seen:
            seen[memory] = len(layers)
            layers.append(tensor)
        index_of[name] = seen[memory]
    return tuple(layers), index_of


def _spec_of(page: Sequence[int], n_layers: int, dtype: torch.dtype, block_tokens: int, per_block: int) -> BlockSpec:
    """Name the axes of a page as far as they are known; else a block is only bytes."""
    page_tokens = block_tokens // per_block
    sizes = list(page)
    try:
        name = dtype_name(dtype)
    except ValueError:
        name = ""
    if name and len(sizes) == _PAGE_AXES and sizes[1] == page_tokens:  # [heads, tokens, content]
        return BlockSpec(n_layers, sizes[0], sizes[2], block_tokens, name, layout="LCHND", kv=1)
    if name and len(sizes) == _PAGE_AXES + 1 and sizes[:2] == [2, page_tokens]:  # [K/V, tokens, heads, D]
        return BlockSpec(n_layers, sizes[2], sizes[3], block_tokens, name, layout="LCND", kv=2)
    if name and len(sizes) == _PAGE_AXES - 1 and sizes[0] == page_tokens:  # [tokens, content]: MLA
        return BlockSpec(n_layers, 1, sizes[1], block_tokens, name, layout="LCND", kv=1)
    nbytes = n_layers * math.prod(sizes) * dtype.itemsize * per_block
    tag = f"vllm-pages:{n_layers}x{'x'.join(map(str, sizes))}:{str(dtype).removeprefix('torch.')}"
    return BlockSpec.opaque(nbytes, block_tokens=block_tokens, tag=tag)


def _named(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
