"""A16: a block is named by everything before it, whatever the tokens come in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import KVCacheKey
from kvstore.types import Presence
from tests.faults.conftest import Rounds
from tests.faults.store import Store, over
from tests.support_faults import SMALL, noise, same, target

LAST = b"X" * 32


def tokens(ids: Any, **more: Any) -> KVCacheKey:
    return KVCacheKey.from_tokens(ids, block_tokens=16, **more)


def hashes(*values: bytes, chained: bool, **more: Any) -> KVCacheKey:
    return KVCacheKey.from_block_hashes(values, block_tokens=16, chained=chained, **more)


def put(cache: Any, key: KVCacheKey, first: int = 0) -> None:
    cache.put(key, noise(SMALL, range(first, first + len(key))))
    cache.flush(60)


def blocks_in(cache: Any, key: KVCacheKey) -> list[bool]:
    return [presence is Presence.PRESENT for presence in cache.contains_each(key)]


@over("LNTS")
def test_the_same_last_hash_after_another_prefix_is_another_block(store: Store) -> None:
    with store.open() as cache:
        put(cache, hashes(b"pA" * 16, LAST, chained=False))
        assert blocks_in(cache, hashes(b"pA" * 16, LAST, chained=False)) == [True, True]
        assert blocks_in(cache, hashes(b"pB" * 16, LAST, chained=False)) == [False, False]
        assert blocks_in(cache, hashes(LAST, chained=False, prefix=[b"pB" * 16])) == [False]
        assert blocks_in(cache, hashes(LAST, chained=False, prefix=[b"pA" * 16])) == [True]
        assert blocks_in(cache, hashes(LAST, chained=False)) == [False]


@over("LNTS")
def test_chained_hashes_stand_alone_and_suffixes_are_slices(store: Store) -> None:
    key = hashes(b"pA" * 16, b"pB" * 16, LAST, chained=True)
    with store.open() as cache:
        put(cache, key)
        alone = hashes(LAST, chained=True)
        out = target(SMALL, 1)
        assert cache.get(alone, out) == 1
        assert same(out, noise(SMALL, [2]))
        assert alone.digests == key.suffix(2).digests == key[2:].digests
        assert blocks_in(cache, hashes(LAST, chained=False)) == [False]


@over("LNTS")
def test_other_orders_prefixes_and_block_sizes_are_other_blocks(store: Store) -> None:
    ids = [*range(48)]
    with store.open() as cache:
        put(cache, tokens(ids))
        assert blocks_in(cache, tokens(ids)) == [True] * 3
        assert blocks_in(cache, tokens(ids[16:32] + ids[:16] + ids[32:])) == [False] * 3
        assert blocks_in(cache, tokens([7] * 16 + ids[16:])) == [False] * 3
        assert blocks_in(cache, tokens(ids[16:])) == [False] * 2
        assert blocks_in(cache, tokens(ids[16:], prefix=ids[:16])) == [True] * 2
        for one, other in ((65, 321), (65, 65 + 2**31), (321, 65 + 2**31)):
            put(cache, tokens([one] * 16))
            assert blocks_in(cache, tokens([one] * 16)) == [True]
            assert blocks_in(cache, tokens([other] * 16)) in ([False], [True])
        assert len({tokens([t] * 16)[0] for t in (65, 321, 65 + 2**31)}) == 3
    wide = dataclasses.replace(SMALL, block_tokens=32, layers=2)
    with store.open(spec=wide) as cache:
        assert blocks_in(cache, KVCacheKey.from_tokens(ids[:32], block_tokens=32)) == [False]


CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "torch": lambda ids: torch.tensor(ids, dtype=torch.int64),
    "torch-int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "range": lambda ids: range(ids[0], ids[-1] + 1),
}


@over("LNTS")
def test_what_the_tokens_come_in_does_not_matter(store: Store) -> None:
    ids = [*range(100, 132)]
    with store.open() as cache:
        put(cache, tokens(ids))
        for name, container in CONTAINERS.items():
            out = target(SMALL, 2)
            assert cache.get(tokens(container(ids)), out) == 2, name
            assert same(out, noise(SMALL, range(2))), name


@over("LNTS")
def test_no_whole_block_is_nothing_to_store(store: Store) -> None:
    with store.open() as cache:
        for ids in ([], [*range(15)]):
            key = tokens(ids)
            assert len(key) == 0
            assert cache.put(key, target(SMALL, 0)) == 0
            assert cache.get(key, target(SMALL, 0)) == 0
            assert cache.contains_each(key) == []
            assert cache.lookup(key).blocks == 0
        put(cache, tokens([*range(31)]))
        assert blocks_in(cache, tokens([*range(31)])) == [True]
        assert store.places() != []
        with pytest.raises(ValueError, match="-1"):
            tokens([-1] * 16)
        with pytest.raises(ValueError, match="4294967296"):
            tokens([2**32] * 16)


def test_random_chains_have_no_name_in_common(rounds: Rounds) -> None:
    rng = np.random.default_rng(16)
    n = rounds(10_000, 100_000)
    names = {tokens(rng.integers(0, 4, 32))[1] for _ in range(n)}  # few tokens, so chains resemble each other
    assert len(names) == n
