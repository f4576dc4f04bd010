"""Keys of both kinds, blocks of every bit pattern, and comparisons by bytes, for all tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from kvstore import BlockHashKey, BlockSpec, KVCache, KVCacheKey, TokenKey

KeyKind = Literal["tokens", "block-hashes"]
KEY_KINDS: tuple[KeyKind, ...] = ("tokens", "block-hashes")
KEY_TYPES: dict[str, type[KVCacheKey]] = {"tokens": TokenKey, "block-hashes": BlockHashKey}

MakeKey = Callable[..., KVCacheKey]
OpenCache = Callable[..., KVCache]
OpenDouble = Callable[..., KVCache]


def key_of(kind: KeyKind, n_blocks: int, *, seed: int = 0, block_tokens: int = 16) -> KVCacheKey:
    """A key of ``n_blocks`` blocks; other seeds share no block."""
    if kind == "tokens":
        ids = np.random.default_rng(seed).integers(0, 50_000, n_blocks * block_tokens)
        return KVCacheKey.from_tokens(ids, block_tokens=block_tokens)
    hashes = [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n_blocks)]
    return KVCacheKey.from_block_hashes(hashes, block_tokens=block_tokens, chained=True)


def blocks_of(spec: BlockSpec, n_blocks: int, *, seed: int = 0) -> torch.Tensor:
    """Incompressible blocks with every bit pattern, NaN payloads included."""
    raw = np.random.default_rng(1000 + seed).integers(0, 256, (n_blocks, spec.nbytes), dtype=np.uint8)
    return torch.from_numpy(raw).view(spec.torch_dtype()).view(n_blocks, *spec.shape)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits, so that NaN equals itself."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((a.view(torch.uint8) == b.view(torch.uint8)).all())
