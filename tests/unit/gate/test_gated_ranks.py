"""Ranks that measure differently still get the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore import BlockStatus, KVCache, KVCacheKey, Namespace, Presence
from tests.support import blocks_of, key_of
from tests.unit.gate.distant import SPEC
from tests.unit.group.ranks import all_at_once, groups, on_each

N = 8


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[KVCache]]:
    there = groups(2)

    def open_one(rank: int) -> KVCache:
        return KVCache.open(
            {
                "l1": {"capacity": "4MiB"},
                "gate": {"prefill_tokens_per_s": 1e4},
                "l2": [{"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "64MiB"}],
            },
            spec=SPEC,
            namespace=Namespace(model="m", revision="r", kv_heads=(rank, rank + 1), rank=rank, world_size=2),
            group=there[rank],
        )

    caches = all_at_once([lambda rank=rank: open_one(rank) for rank in range(2)])  # type: ignore[misc]
    yield caches
    for cache in caches:
        cache.close()


def stored(ranks: list[KVCache]) -> KVCacheKey:
    key = key_of("tokens", N)
    for cache in ranks:
        assert cache.put(key, blocks_of(SPEC, N)) == N
        cache.flush(20)
        assert cache._state is not None
        assert cache._state.stack.l1 is not None
        cache._state.stack.l1.clear()
    return key


def make_slow(cache: KVCache) -> None:
    assert cache._state is not None
    for n_blocks in (1, 8) * 4:
        cache._state.stack.tiers[0].reader.times.note(n_blocks, 0.1 * n_blocks)


def room() -> torch.Tensor:
    return torch.zeros((N, *SPEC.shape), dtype=SPEC.torch_dtype())


def acquired(cache: KVCache, key: KVCacheKey) -> int:
    with cache.acquire(key) as lease:
        return lease.blocks


def test_what_one_rank_declines_none_gets(ranks: list[KVCache]) -> None:
    key = stored(ranks)
    make_slow(ranks[0])
    assert on_each(ranks, lambda cache: cache.lookup(key).blocks) == [0, 0]
    assert on_each(ranks, lambda cache: cache.contains_each(key)) == [[Presence.ABSENT] * N] * 2
    assert on_each(ranks, lambda cache: cache.get_each(key, room())) == [[BlockStatus.ABSENT] * N] * 2
    assert on_each(ranks, lambda cache: cache.get(key, room())) == [0, 0]
    assert on_each(ranks, lambda cache: acquired(cache, key)) == [0, 0]
    assert on_each(ranks, lambda cache: len(list(cache.stream(key)))) == [0, 0]
    gated = [cache.stats().tiers[0].counters.gated for cache in ranks]
    assert gated == [4 * N, 0]  # get_each, get, acquire and stream
    for cache in ranks:
        counters = cache.stats().tiers[0].counters
        assert counters.lookups == counters.hits + counters.misses


def test_what_all_ranks_promised_all_of_them_load(ranks: list[KVCache]) -> None:
    key = stored(ranks)
    assert on_each(ranks, lambda cache: cache.lookup(key).blocks) == [N, N]
    make_slow(ranks[1])
    assert on_each(ranks, lambda cache: cache.get(key, room())) == [N, N]
