"""Small caches, both kinds of keys, and blocks whose bytes follow from their key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvstore.compat import aibrix

BLOCK_TOKENS = 4
KINDS = ("tokens", "hashes")
MakeCache = Callable[..., aibrix.BaseKVCacheManager]


def config_of(layout: str = "NCLD", **spec: Any) -> aibrix.KVCacheConfig:
    tensor = aibrix.KVCacheTensorSpec(
        heads=spec.pop("heads", [0, 1]), layers=spec.pop("layers", range(3)), head_size=spec.pop("head_size", 8)
    )
    block = aibrix.KVCacheBlockSpec(
        block_ntokens=spec.pop("block_ntokens", BLOCK_TOKENS),
        block_dtype=spec.pop("dtype", torch.bfloat16),
        block_layout=aibrix.KVCacheBlockLayout[layout],
        tensor_spec=tensor,
    )
    return aibrix.KVCacheConfig(block, aibrix.ModelSpec(max_model_len=4096), **spec)


def tokens_of(n_blocks: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + i * 31) % 32_000 for i in range(n_blocks * BLOCK_TOKENS)]


def ids_of(kind: str, n_blocks: int, seed: int = 0) -> Any:
    """A query of whole blocks; other seeds share none."""
    tokens = tokens_of(n_blocks, seed)
    if kind == "tokens":
        return aibrix.TokenListView(tokens)
    hashes, chained = [], b""
    for start in range(0, len(tokens), BLOCK_TOKENS):
        chained = hashlib.sha256(chained + repr(tokens[start : start + BLOCK_TOKENS]).encode()).digest()
        hashes.append(chained.hex())
    return aibrix.BlockHashes(hashes, BLOCK_TOKENS)


def fill(tensors: Sequence[torch.Tensor], first: int = 0) -> None:
    """Make block ``i`` all ``first + i``."""
    for i, tensor in enumerate(tensors):
        tensor.fill_(first + i)


def values(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The value that :func:`fill` gave each block; fails where a block is not uniform."""
    for tensor in tensors:
        assert bool((tensor == tensor.flatten()[0]).all())
    return [float(tensor.flatten()[0]) for tensor in tensors]


def store(cache: aibrix.BaseKVCacheManager, prefix: Any, query: Any, first: int = 0) -> None:
    """Put blocks that :func:`fill` made."""
    handle = cache.allocate_for(prefix, query).get()
    fill(handle.to_tensors(), first)
    status = cache.put(prefix, query, handle)
    assert status == aibrix.Status.ok(len(query))


def own_memory(cache: aibrix.BaseKVCacheManager, n_blocks: int) -> tuple[torch.Tensor, aibrix.KVCacheHandle]:
    """The caller's tensor of ``n_blocks`` blocks, all -1, and a handle over it."""
    memory = torch.full((n_blocks, *cache.block_shape), -1, dtype=cache.block_dtype)
    blocks = [memory[i : i + 1] for i in range(n_blocks)]
    handle = aibrix.MemoryRegionKVCacheHandle.create(blocks, cache.block_spec, [(i, 0) for i in range(n_blocks)])
    return memory, handle
