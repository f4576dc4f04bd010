"""Random pages and what blocks made of them must look like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore import BlockSpec, KVCacheKey


def random_layers(n_layers: int, shape: Sequence[int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Tensors with every bit pattern."""
    rng = np.random.default_rng(seed)
    nbytes = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    raw = [torch.from_numpy(rng.integers(0, 256, nbytes, np.uint8)) for _ in range(n_layers)]
    return [r.view(dtype).view(*shape) for r in raw]


def page_bytes(layer: torch.Tensor, block_dim: int, page: int) -> bytes:
    """A page in its own logical order."""
    return layer.select(block_dim, page).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def contents(layers: Sequence[torch.Tensor], block_dim: int) -> list[list[bytes]]:
    """Bytes of every page of every layer."""
    return [[page_bytes(layer, block_dim, page) for page in range(layer.shape[block_dim])] for layer in layers]


def key_for(spec: BlockSpec, n_blocks: int, *, seed: int = 0) -> KVCacheKey:
    ids = np.random.default_rng(seed).integers(0, 50_000, n_blocks * spec.block_tokens)
    return KVCacheKey.from_tokens(ids, block_tokens=spec.block_tokens)


def opaque(layers: Sequence[torch.Tensor], block_dim: int = 0, *, pages_per_block: int = 1) -> BlockSpec:
    """The spec of blocks that are only bytes."""
    page = len(page_bytes(layers[0], block_dim, 0))
    return BlockSpec.opaque(len(layers) * page * pages_per_block, block_tokens=4, tag="test")
