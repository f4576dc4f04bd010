"""Laws about a cache over the backend: bytes or a miss, whatever lies on the medium."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

import numpy as np
import pytest
import torch

from kvstore import BlockHashKey, BlockSpec, BlockStatus, KVCache, KVCacheKey, Namespace, TokenKey
from kvstore.backend import Backend, Capability
from kvstore.l2.counters import TierCounters
from kvstore.l2.names import name_prefix
from kvstore.testing.raw import MakeRaw
from kvstore.testing.registering import register_backend
from kvstore.testing.store import Store

SPEC: Final = BlockSpec(layers=2, kv_heads=2, head_dim=32, block_tokens=16, dtype="bfloat16")
NAMESPACE: Final = Namespace(model="test/model", revision="r1")
_KEY_TYPES: Final[dict[str, type[KVCacheKey]]] = {"tokens": TokenKey, "block-hashes": BlockHashKey}
_FLUSH_S: Final = 30.0

Damage = Callable[[bytes], bytes]

_DAMAGES: Final[dict[str, Damage]] = {
    "empty": lambda _: b"",
    "a header cut off": lambda good: good[:100],
    "no payload": lambda good: good[:192],
    "one byte short": lambda good: good[:-1],
    "one byte long": lambda good: good + b"\0",
    "a zeroed tail": lambda good: good[:-512] + bytes(512),
    "zeros": lambda good: bytes(len(good)),
    "noise": lambda good: hashlib.shake_256(good).digest(len(good)),
    "a flipped bit in the payload": lambda good: good[:-9] + bytes([good[-9] ^ 4]) + good[-8:],
    "a flipped bit in the header": lambda good: good[:33] + bytes([good[33] ^ 1]) + good[34:],
    "another magic": lambda good: b"NOPE" + good[4:],
    "a version of the future": lambda good: good[:4] + b"\xff\x7f" + good[6:],
    "a version of the past": lambda good: good[:4] + b"\0\0" + good[6:],
}


def key_of(kind: str, n_blocks: int, seed: int = 0) -> KVCacheKey:
    """A key of the wanted kind; other seeds share no block."""
    key: KVCacheKey
    if kind == "tokens":
        ids = np.random.default_rng(seed).integers(0, 50_000, n_blocks * SPEC.block_tokens)
        key = KVCacheKey.from_tokens(ids, block_tokens=SPEC.block_tokens)
    else:
        hashes = [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n_blocks)]
        key = KVCacheKey.from_block_hashes(hashes, block_tokens=SPEC.block_tokens, chained=True)
    assert type(key) is _KEY_TYPES[kind]  # a suite that built one kind twice would prove half
    return key


def blocks_of(n_blocks: int, seed: int = 0) -> torch.Tensor:
    """Blocks of every bit pattern, NaN payloads included."""
    raw = np.random.default_rng(1000 + seed).integers(0, 256, (n_blocks, SPEC.nbytes), dtype=np.uint8)
    return torch.from_numpy(raw).view(torch.bfloat16).view(n_blocks, *SPEC.shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes: NaN equals itself only so."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Cached:
    """A cache without L1 over the backend under test, and that backend."""

    def __init__(self, store: Store, spec: BlockSpec = SPEC, namespace: Namespace = NAMESPACE) -> None:
        made: list[Backend] = []

        def factory() -> Backend:
            made.append(store.make())
            return made[-1]

        plugin = store.plugin
        registry, name = register_backend(factory, options=plugin.options, max_writers=plugin.max_writers)
        config = {"l1": {"enabled": False}, "l2": [store.target.tier(backend=name)]}
        self.spec = spec
        self.namespace = namespace
        self.cache = KVCache.open(config, spec=spec, namespace=namespace, registry=registry)
        self.backend = made[-1]

    def put(self, key: KVCacheKey, blocks: torch.Tensor) -> None:
        """Store blocks and wait until they are on the medium."""
        assert self.cache.put(key, blocks) == len(key)
        self.cache.flush(_FLUSH_S)

    def name_of(self, key: KVCacheKey) -> bytes:
        """Stored name of the first block of ``key``."""
        namespace = self.namespace.digest(self.spec)
        return name_prefix(namespace, self.backend.epoch(namespace)) + bytes([key.kind]) + key[0]

    def counters(self) -> TierCounters:
        """Counters of the tier."""
        return self.cache.stats().tiers[0].counters

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cache.close()


class CachingLaws:
    """``KVCache`` over one tier of the backend, without L1."""

    @pytest.fixture(params=list(_KEY_TYPES))
    def key_kind(self, request: pytest.FixtureRequest) -> str:
        """Both kinds of keys, one after the other."""
        return str(request.param)

    @pytest.fixture
    def cached(self, store: Store) -> Iterator[Cached]:
        """A cache over the place."""
        with Cached(store) as cached:
            yield cached

    def test_blocks_come_back_bit_for_bit(self, cached: Cached, key_kind: str) -> None:
        key, blocks = key_of(key_kind, 20), blocks_of(20)
        cached.put(key, blocks)
        out = torch.zeros_like(blocks)
        assert cached.cache.get(key, out) == 20
        assert bits(out) == bits(blocks)
        assert cached.cache.lookup(key).blocks == 20
        part = torch.zeros_like(blocks[:5])
        assert cached.cache.get_each(key[4:9], part) == [BlockStatus.DELIVERED] * 5
        assert bits(part) == bits(blocks[4:9])
        counters = cached.counters()
        assert (counters.corrupt, counters.key_mismatch, counters.io_errors, counters.timeouts) == (0, 0, 0, 0)

    def test_a_hole_ends_a_prefix(self, cached: Cached, key_kind: str) -> None:
        key, blocks = key_of(key_kind, 6), blocks_of(6)
        cached.put(key[:2], blocks[:2])
        cached.put(key[3:], blocks[3:])
        out = torch.full_like(blocks, 7.0)
        assert cached.cache.get(key, out) == 2
        assert bits(out[2:]) == bits(torch.full_like(blocks[2:], 7.0))
        statuses = cached.cache.get_each(key, out)
        assert [status is BlockStatus.DELIVERED for status in statuses] == [i != 2 for i in range(6)]

    def test_deleted_blocks_are_misses(self, cached: Cached, key_kind: str) -> None:
        key, blocks = key_of(key_kind, 6), blocks_of(6)
        cached.put(key, blocks)
        assert cached.cache.delete(key) == 6
        assert cached.cache.lookup(key).blocks == 0
        assert cached.cache.get(key, torch.zeros_like(blocks)) == 0
        assert cached.cache.delete(key) == 0

    def test_clear_forgets_everything_at_once(self, cached: Cached, key_kind: str) -> None:
        key, blocks = key_of(key_kind, 6), blocks_of(6)
        cached.put(key, blocks)
        cached.cache.clear()
        assert cached.cache.lookup(key).blocks == 0
        assert cached.cache.get(key, torch.zeros_like(blocks)) == 0
        cached.put(key, blocks)
        out = torch.zeros_like(blocks)
        assert cached.cache.get(key, out) == 6
        assert bits(out) == bits(blocks)

    def test_blocks_survive_a_reopen_where_that_is_declared(self, store: Store, key_kind: str) -> None:
        key, blocks = key_of(key_kind, 5), blocks_of(5)
        with Cached(store) as cached:
            cached.put(key, blocks)
        with Cached(store) as cached:
            out = torch.zeros_like(blocks)
            assert cached.cache.get(key, out) == (5 if store.has(Capability.PERSISTENT) else 0)
            assert bits(out) == bits(blocks if store.has(Capability.PERSISTENT) else torch.zeros_like(blocks))

    def test_other_namespaces_and_specs_share_nothing(self, store: Store, key_kind: str) -> None:
        key = key_of(key_kind, 3)
        with Cached(store) as cached:
            cached.put(key, blocks_of(3))
        half = BlockSpec(layers=2, kv_heads=2, head_dim=32, block_tokens=16, dtype="float16")
        for spec, namespace in ((SPEC, Namespace(model="test/model", revision="r2")), (half, NAMESPACE)):
            with Cached(store, spec, namespace) as other:
                out = torch.zeros(3, *spec.shape, dtype=spec.torch_dtype())
                assert other.cache.get(key, out) == 0
                assert not out.any()

    def test_a_damaged_record_is_a_miss_and_is_counted(self, cached: Cached, raw: MakeRaw) -> None:
        key, out = key_of("tokens", 1), torch.full_like(blocks_of(1), 7.0)
        cached.put(key, blocks_of(1))
        medium, name = raw(cached.backend), cached.name_of(key)
        good, untouched = medium.get(name), bits(out)
        assert good is not None
        for n, (damage, make) in enumerate(_DAMAGES.items(), 1):
            medium.put(name, make(good))
            assert cached.cache.get(key, out) == 0, damage
            assert bits(out) == untouched, damage
            counters = cached.counters()
            assert counters.corrupt + counters.key_mismatch + counters.spec_mismatch == n, damage
            assert cached.cache.lookup(key).blocks == 0, f"{damage}: the record is offered again"
        cached.put(key, blocks_of(1))
        assert cached.cache.get(key, out) == 1
        assert bits(out) == bits(blocks_of(1))

    def test_a_record_of_another_block_is_a_miss(self, cached: Cached, raw: MakeRaw) -> None:
        key, other = key_of("tokens", 1), key_of("tokens", 1, seed=1)
        cached.put(key, blocks_of(1))
        cached.put(other, blocks_of(1, seed=1))
        medium = raw(cached.backend)
        foreign = medium.get(cached.name_of(other))
        assert foreign is not None
        medium.put(cached.name_of(key), foreign)
        out = torch.zeros_like(blocks_of(1))
        assert cached.cache.get(key, out) == 0
        assert not out.any()
        assert cached.counters().key_mismatch == 1
        assert cached.cache.get(other, out) == 1
        assert bits(out) == bits(blocks_of(1, seed=1))
