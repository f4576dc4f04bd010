"""Small L1 caches and keys for the tests of this folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvstore.eviction import EvictionPolicy
from kvstore.l1.cache import L1Cache
from kvstore.l1.entry import Entry
from kvstore.l1.policies.prefix_lru import PrefixLruPolicy
from kvstore.spec import BlockSpec

MakeL1 = Callable[..., L1Cache]
Put = Callable[..., list[Entry]]


@pytest.fixture
def spec() -> BlockSpec:
    """Blocks of 32 KiB: a slot takes 36 KiB."""
    return BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")


@pytest.fixture
def make_l1(spec: BlockSpec) -> Iterator[MakeL1]:
    """``make_l1(n_blocks, policy)``: a cache of exactly so many slots."""
    opened: list[L1Cache] = []

    def make(n_blocks: int, policy: Callable[[], EvictionPolicy] = PrefixLruPolicy) -> L1Cache:
        l1 = L1Cache(spec, n_blocks * (spec.nbytes + 4096), lambda _: policy())
        assert l1.counters.capacity_blocks == n_blocks
        opened.append(l1)
        return l1

    yield make
    for l1 in opened:
        l1.close()


@pytest.fixture
def chain() -> Callable[[str, int], list[bytes]]:
    """``chain(name, n)``: digests of a sequence of n blocks."""

    def make(name: str, n_blocks: int) -> list[bytes]:
        return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(n_blocks)]

    return make


@pytest.fixture
def content() -> Callable[[bytes, int], np.ndarray]:
    """``content(digest, nbytes)``: the bytes that belong to a digest, incompressible, NaNs included."""

    def make(digest: bytes, nbytes: int) -> np.ndarray:
        return np.frombuffer(hashlib.shake_256(digest).digest(nbytes), np.uint8)

    return make


@pytest.fixture
def put(content: Callable[[bytes, int], np.ndarray]) -> Put:
    """``put(l1, digests, pins=0)``: what the core does for one put; stores a prefix when short of room."""

    def store(l1: L1Cache, digests: Sequence[bytes], *, pins: int = 0) -> list[Entry]:
        slots = l1.reserve(len(digests))
        for slot, digest in zip(slots, digests, strict=False):
            np.copyto(l1.pool.payload(slot), content(digest, l1.spec.nbytes))
        items = list(zip(digests, [None, *digests[:-1]], strict=True))
        return l1.publish(items[: len(slots)], slots, pins=pins)

    return store
