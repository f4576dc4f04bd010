from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvstore_lmcache.layout import ChunkLayout
from kvstore_lmcache.names import ChunkName
from kvstore_lmcache.options import Options
from kvstore_lmcache.stores import Stores

from kvstore.backend import Backend
from kvstore.memory_backend import MemoryBackend
from kvstore.testing import register_backend

LAYOUT = ChunkLayout.of([(2, 3, 16, 32)], [torch.bfloat16], "KV_2LTD")
OpenStores = Callable[..., Stores]


@pytest.fixture
def open_stores() -> Iterator[OpenStores]:
    """Stores over one tier, a double or memory; closed at the end."""
    opened = []

    def make(backend: Backend | None = None, *, l1: dict[str, Any] | None = None, **options: Any) -> Stores:
        medium = backend or MemoryBackend()
        registry, name = register_backend(lambda: medium)
        tier = {"backend": name, "capacity": "64MiB", "deadline": "1s"}
        config: dict[str, Any] = {"l2": [tier]} | ({} if l1 is None else {"l1": l1})
        stores = Stores(Options(config=config, revision="r", **options), registry=registry)
        opened.append(stores)
        return stores

    yield make
    for stores in opened:
        stores.close()


def names(*hashes: int, **fields: Any) -> list[ChunkName]:
    return [ChunkName(chunk_hash=value, model="m", **fields) for value in hashes]


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
