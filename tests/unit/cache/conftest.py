"""Keys of both kinds and caches over a real LMDB store, for the tests of the public calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.backend import Backend
from tests import doubles
from tests.support import KEY_KINDS, KEY_TYPES, KeyKind, MakeKey, OpenCache, OpenDouble, key_of


@pytest.fixture(params=KEY_KINDS)
def key_kind(request: pytest.FixtureRequest) -> KeyKind:
    kind: KeyKind = request.param
    return kind


@pytest.fixture
def make_key(key_kind: KeyKind) -> MakeKey:
    def make(n_blocks: int, *, seed: int = 0, block_tokens: int = 16) -> KVCacheKey:
        key = key_of(key_kind, n_blocks, seed=seed, block_tokens=block_tokens)
        # the lesson of a fixture that silently built one kind twice
        assert type(key) is KEY_TYPES[key_kind]
        return key

    return make


@pytest.fixture
def spec() -> BlockSpec:
    return BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(model="test/model", revision="r1")


@pytest.fixture
def lmdb_config(tmp_path: Path) -> dict[str, Any]:
    return {
        "l1": {"capacity": "8MiB"},
        "l2": [{"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "256MiB"}],
    }


@pytest.fixture
def open_cache(spec: BlockSpec, namespace: Namespace, lmdb_config: dict[str, Any]) -> Iterator[OpenCache]:
    opened: list[KVCache] = []

    def open_one(config: Any = None, **changes: Any) -> KVCache:
        cache = KVCache.open(
            lmdb_config if config is None else config,
            spec=changes.get("spec", spec),
            namespace=changes.get("namespace", namespace),
        )
        opened.append(cache)
        return cache

    yield open_one
    for cache in opened:
        cache.close()


@pytest.fixture
def open_double(spec: BlockSpec, namespace: Namespace, request: pytest.FixtureRequest) -> OpenDouble:
    def open_one(*factories: Callable[[], Backend], l1: Any = None, **settings: Any) -> KVCache:
        registry, tiers = None, []
        for factory in factories:
            registry, name = doubles.register(factory, registry)
            tiers.append({"backend": name, **settings})
        config = {"l1": l1 or {"enabled": False}, "l2": tiers}
        cache = KVCache.open(config, spec=spec, namespace=namespace, registry=registry)
        request.addfinalizer(cache.close)
        return cache

    return open_one
