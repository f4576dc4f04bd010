"""Every read of a grouped cache gives all ranks what all of them have, and nothing else."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch

from kvstore import BlockSpec, BlockStatus, ConfigError, KVCache, KVCacheKey, Namespace, Presence
from kvstore.errors import BackendUnavailableError
from tests import doubles
from tests.support import KEY_KINDS, blocks_of, key_of, same_bytes
from tests.unit.group.ranks import DEADLINE_S, SLACK_S, all_at_once, counted, groups, on_each

SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
N = 8

OpenRanks = Callable[..., list[KVCache]]


def mine(cache: KVCache) -> torch.Tensor:
    """The blocks of a rank: other bytes on each."""
    assert cache.namespace.rank is not None
    return blocks_of(cache.spec, N, seed=cache.namespace.rank)


def config_of(path: Path, *, l1: bool = True) -> dict[str, Any]:
    """A rank on a store that all of them share."""
    return {
        "defaults": {"deadline": f"{DEADLINE_S}s"},
        "l1": {"capacity": "4MiB"} if l1 else {"enabled": False},
        "l2": [{"backend": "lmdb", "path": str(path), "capacity": "64MiB"}],
    }


@pytest.fixture
def open_ranks(tmp_path: Path, request: pytest.FixtureRequest) -> OpenRanks:
    def open_all(size: int = 2, *, configs: Sequence[Any] = (), registries: Sequence[Any] = ()) -> list[KVCache]:
        there = groups(size)

        def open_one(rank: int) -> KVCache:
            return KVCache.open(
                configs[rank] if configs else config_of(tmp_path / "store"),
                spec=SPEC,
                namespace=Namespace(
                    model="m", revision="r", kv_heads=(2 * rank, 2 * rank + 2), rank=rank, world_size=size
                ),
                registry=registries[rank] if registries else None,
                group=there[rank],
            )

        caches = all_at_once([lambda rank=rank: open_one(rank) for rank in range(size)])  # type: ignore[misc]
        for cache in caches:
            request.addfinalizer(cache.close)
        return caches

    return open_all


@pytest.fixture(params=["L1", "no L1"])
def caches(request: pytest.FixtureRequest, open_ranks: OpenRanks, tmp_path: Path) -> list[KVCache]:
    return open_ranks(configs=[config_of(tmp_path / "store", l1=request.param == "L1")] * 2)


def store(caches: Sequence[KVCache], key: KVCacheKey, missing: dict[int, int]) -> None:
    """Put a key on every rank, then delete one block on some ranks, so that it begins a hole."""
    for rank, cache in enumerate(caches):
        assert cache.put(key, mine(cache)) == N
        cache.flush(20)
        if rank in missing:
            assert cache.delete(key[missing[rank] : missing[rank] + 1]) == 1


def untouched(cache: KVCache) -> torch.Tensor:
    return torch.full((N, *cache.spec.shape), 7.0, dtype=torch.bfloat16)


def read(cache: KVCache, key: KVCacheKey) -> tuple[int, bool, bool]:
    """Get a key: how much, whether it is this rank's own bytes, whether the rest is untouched."""
    out = untouched(cache)
    n = cache.get(key, out)
    return n, same_bytes(out[:n], mine(cache)[:n]), same_bytes(out[n:], untouched(cache)[n:])


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_a_hole_on_one_rank_ends_the_prefix_of_all(caches: list[KVCache], kind: Any) -> None:
    key = key_of(kind, N)
    store(caches, key, {1: 5})

    assert [found.blocks for found in on_each(caches, lambda c: c.lookup(key))] == [5, 5]
    assert on_each(caches, lambda c: read(c, key)) == [(5, True, True)] * 2
    assert counted(caches, "trimmed_blocks") == [6, 0]


def test_the_numbers_of_a_lookup_add_up_when_cut(caches: list[KVCache]) -> None:
    key = key_of("tokens", N)
    store(caches, key, {1: 3})

    for found in on_each(caches, lambda c: c.lookup(key)):
        assert (found.blocks, found.tokens, sum(found.by_tier.values())) == (3, 48, 3)


def test_what_all_ranks_have_is_delivered_whole(caches: list[KVCache]) -> None:
    key = key_of("tokens", N)
    store(caches, key, {})

    assert on_each(caches, lambda c: read(c, key)) == [(N, True, True)] * 2
    assert on_each(caches, lambda c: read(c, key)) == [(N, True, True)] * 2
    for cache in caches:
        stats = cache.stats()
        assert stats.cache.lookups == stats.cache.hits == 2 * N
        tier = stats.tiers[0].counters
        assert tier.lookups == tier.hits + tier.misses
        assert stats.cache.hits == stats.cache.l1_hits + tier.hits


def test_a_read_longer_than_a_chunk_is_agreed_piece_by_piece(caches: list[KVCache]) -> None:
    key = key_of("tokens", N)
    store(caches, key, {1: 6})
    for cache in caches:
        assert cache._agreement is not None
        cache._agreement.chunk_blocks = 3
    before = [c.stats().cache for c in caches]

    assert on_each(caches, lambda c: read(c, key)) == [(6, True, True)] * 2
    assert on_each(caches, lambda c: c.get_each(key, untouched(c)).count(BlockStatus.DELIVERED)) == [7, 7]
    for cache, was in zip(caches, before, strict=True):
        now = cache.stats().cache
        assert (now.lookups - was.lookups, now.hits - was.hits) == (2 * N, 13)


def test_independent_blocks_are_delivered_where_all_have_them(caches: list[KVCache]) -> None:
    key = key_of("block-hashes", N)
    store(caches, key, {0: 2, 1: 5})
    outs = [untouched(cache) for cache in caches]

    assert (
        on_each(caches, lambda c: c.contains_each(key))
        == [[Presence.ABSENT if i in (2, 5) else Presence.PRESENT for i in range(N)]] * 2
    )
    statuses = on_each(caches, lambda c: c.get_each(key, outs[c.namespace.rank or 0]))

    assert statuses == [[BlockStatus.ABSENT if i in (2, 5) else BlockStatus.DELIVERED for i in range(N)]] * 2
    for cache, out in zip(caches, outs, strict=True):
        for i in range(N):
            assert same_bytes(out[i], (untouched(cache) if i in (2, 5) else mine(cache))[i])


def test_a_stream_ends_for_all_where_it_ends_for_one(caches: list[KVCache]) -> None:
    key = key_of("tokens", N)
    store(caches, key, {0: 4})

    def stream(cache: KVCache) -> tuple[list[int], bool]:
        streamed = list(cache.stream(key))
        joined = torch.cat([group.tensor for group in streamed], dim=1)
        return [group.n_blocks for group in streamed], same_bytes(joined, mine(cache)[:4])

    assert on_each(caches, stream) == [([4], True)] * 2


def test_a_lease_is_as_long_as_the_shortest_and_the_rest_is_given_back(open_ranks: OpenRanks) -> None:
    caches = open_ranks()
    key = key_of("tokens", N)
    store(caches, key, {1: 3})

    leases = on_each(caches, lambda c: c.acquire(key))

    for cache, lease in zip(caches, leases, strict=True):
        assert lease.blocks == 3
        assert same_bytes(torch.stack(lease.tensors), mine(cache)[:3])
        assert cache.stats().l1.pinned_blocks == 3  # type: ignore[union-attr]
        lease.release()
        assert cache.stats().l1.pinned_blocks == 0  # type: ignore[union-attr]


def test_four_ranks_agree(open_ranks: OpenRanks) -> None:
    caches = open_ranks(4)
    key = key_of("tokens", N)
    store(caches, key, {0: 7, 2: 5})

    assert on_each(caches, lambda c: read(c, key)) == [(5, True, True)] * 4


@pytest.mark.parametrize("rank", range(4))
def test_a_hole_on_any_one_rank_is_a_hole_of_all(open_ranks: OpenRanks, rank: int) -> None:
    caches = open_ranks(4)
    key = key_of("tokens", N)
    store(caches, key, {rank: 3})

    assert [found.blocks for found in on_each(caches, lambda c: c.lookup(key))] == [3] * 4


def test_prefetch_and_writes_are_each_ranks_own(open_ranks: OpenRanks) -> None:
    """They ask no question, so a rank may make them alone."""
    caches = open_ranks()
    key = key_of("tokens", N)
    store(caches, key, {1: 5})
    before = [c.stats().group for c in caches]

    assert caches[0].prefetch(key).result(10) == N
    assert caches[1].prefetch(key).result(10) == 5
    with caches[0].allocate(key_of("tokens", 2, seed=3)) as reservation:
        reservation.commit()
    caches[0].clear()

    assert [c.stats().group for c in caches] == before


def test_an_empty_key_asks_nothing(caches: list[KVCache]) -> None:
    key, nothing = key_of("tokens", 0), torch.zeros((0, *SPEC.shape), dtype=torch.bfloat16)
    cache = caches[0]

    assert (cache.lookup(key).blocks, cache.get(key, nothing)) == (0, 0)
    assert (cache.get_each(key, nothing), cache.contains_each(key), list(cache.stream(key))) == ([], [], [])
    if cache.config.l1.enabled:
        assert cache.acquire(key).blocks == 0


def test_other_keys_on_other_ranks_are_misses_and_counted(caches: list[KVCache]) -> None:
    keys = [key_of("tokens", N), key_of("tokens", N, seed=1)]
    for key in keys:
        store(caches, key, {})

    assert on_each(caches, lambda c: read(c, keys[c.namespace.rank or 0])) == [(0, True, True)] * 2
    assert counted(caches, "mismatches") == [1, 1]
    assert [c.health().state for c in caches] == ["degraded"] * 2
    assert on_each(caches, lambda c: read(c, keys[0])) == [(N, True, True)] * 2
    assert [c.health().state for c in caches] == ["ok"] * 2


def test_a_corrupt_block_on_one_rank_is_nobodys_hit(open_ranks: OpenRanks, tmp_path: Path) -> None:
    key = key_of("tokens", N)
    configs = [config_of(tmp_path / f"store{rank}", l1=False) for rank in range(2)]
    caches = open_ranks(configs=configs)
    store(caches, key, {})
    for cache in caches:
        cache.close()
    damage(tmp_path / "store1", key.digests[6])
    caches = open_ranks(configs=configs)

    assert on_each(caches, lambda c: read(c, key)) == [(6, True, True)] * 2
    corrupt = [c.stats().tiers[0].counters.corrupt for c in caches]
    assert corrupt == [0, 1]


def damage(path: Path, digest: bytes) -> None:
    """Flip one bit in the middle of a stored record."""
    with lmdb.open(str(path), max_dbs=8, subdir=True) as env:
        records = env.open_db(b"records")
        with env.begin(write=True) as txn, txn.cursor(records) as cursor:
            name = next(name for name, _ in cursor if name.endswith(digest))
            value = bytearray(txn.get(name, db=records) or b"")
            value[len(value) // 2] ^= 1
            txn.put(name, bytes(value), db=records)


def test_a_tier_that_fails_on_one_rank_is_a_miss_on_all(open_ranks: OpenRanks) -> None:
    backends = [doubles.GatedBackend(), doubles.GatedBackend()]
    made = [doubles.register(lambda backend=backend: backend) for backend in backends]  # type: ignore[misc]
    configs = [
        {
            "defaults": {"deadline": f"{DEADLINE_S}s"},
            "l1": {"enabled": False},
            "l2": [{"backend": name, "deadline": f"{DEADLINE_S}s"}],
        }
        for _, name in made
    ]
    caches = open_ranks(configs=configs, registries=[registry for registry, _ in made])
    key = key_of("tokens", N)
    store(caches, key, {})
    assert on_each(caches, lambda c: read(c, key)) == [(N, True, True)] * 2

    backends[1].gate.clear()
    began = time.monotonic()
    hung = on_each(caches, lambda c: read(c, key))
    took_s = time.monotonic() - began
    backends[1].gate.set()

    assert hung == [(0, True, True)] * 2, "it hangs on one rank, and that rank has its answer in time"
    assert took_s < DEADLINE_S + SLACK_S
    assert counted(caches, "failures") == [0, 0]


def test_a_call_that_raises_on_one_rank_is_a_miss_on_the_others(caches: list[KVCache]) -> None:
    key = key_of("tokens", N)
    store(caches, key, {})
    state = caches[1]._state
    assert state is not None

    def broken(*_: Any) -> Any:
        raise MemoryError

    lookup, state.reads._reads.lookup = state.reads._reads.lookup, broken  # type: ignore[union-attr,method-assign]

    def look(cache: KVCache) -> int:
        try:
            return cache.lookup(key).blocks
        except MemoryError:
            return -1

    assert on_each(caches, look) == [0, -1]
    state.reads._reads.lookup = lookup  # type: ignore[union-attr,method-assign]
    assert on_each(caches, look) == [N, N]


def test_without_the_others_everything_is_a_miss_and_health_says_so(caches: list[KVCache]) -> None:
    key = key_of("tokens", N)
    store(caches, key, {})
    caches[1].close()
    cache = caches[0]

    assert read(cache, key) == (0, True, True)
    began = time.monotonic()
    assert cache.lookup(key).blocks == 0
    assert cache.get_each(key, untouched(cache)) == [BlockStatus.UNAVAILABLE] * N
    assert cache.contains_each(key) == [Presence.UNKNOWN] * N
    assert list(cache.stream(key)) == []
    if cache.config.l1.enabled:
        assert cache.acquire(key).blocks == 0
    assert time.monotonic() - began < 0.5
    health = cache.health()
    assert (health.state, health.tiers["lmdb"].state) == ("down", "ok")
    assert health.group is not None
    assert health.to_dict()["group"]["state"] == "down"
    assert cache.put(key_of("tokens", N, seed=5), mine(cache)) == N, "what is computed is still stored"


def test_a_rank_that_comes_late_gets_the_same_nothing(caches: list[KVCache]) -> None:
    key = key_of("tokens", N)
    store(caches, key, {})

    def late(cache: KVCache) -> tuple[int, bool, bool]:
        if cache.namespace.rank:
            time.sleep(1.5 * DEADLINE_S)
        return read(cache, key)

    assert on_each(caches, late) == [(0, True, True)] * 2
    assert on_each(caches, lambda c: read(c, key)) == [(0, True, True)] * 2


def test_a_forked_child_of_a_rank_has_misses_and_does_not_disturb_the_ranks(caches: list[KVCache]) -> None:
    key = key_of("tokens", N)
    store(caches, key, {})
    out = untouched(caches[0])  # torch's own threads do not survive a fork, so the child must not fill tensors

    pid = os.fork()
    if not pid:
        code = 1
        try:
            cache = caches[0]
            missed = cache.get(key, out) == cache.lookup(key).blocks == 0 and cache.health().state == "down"
            cache.close()
            code = 0 if missed else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert on_each(caches, lambda c: read(c, key)) == [(N, True, True)] * 2


def test_a_setting_that_is_wrong_on_one_rank_opens_no_cache_at_all(open_ranks: OpenRanks, tmp_path: Path) -> None:
    good = config_of(tmp_path / "store")
    with pytest.raises((ConfigError, BackendUnavailableError)) as raised:
        open_ranks(configs=[good, good | {"l2": [{"backend": "lmdb"}]}])
    assert "path" in str(raised.value) or "another rank" in str(raised.value)

    caches = open_ranks(configs=[good, good])
    assert [c.health().state for c in caches] == ["ok", "ok"], "nothing was left open"


def test_calls_in_order_never_mismatch(caches: list[KVCache]) -> None:
    keys = [key_of("tokens", N, seed=seed) for seed in range(3)]
    for key, hole in zip(keys, (2, 4, 6), strict=True):
        store(caches, key, {hole % 2: hole})

    def session(cache: KVCache) -> list[int]:
        found = []
        for key, _ in itertools.product(keys, range(3)):
            found += [cache.lookup(key).blocks, read(cache, key)[0], *(g.n_blocks for g in cache.stream(key))]
        return found

    first, second = on_each(caches, session)
    assert first == second == [n for hole in (2, 4, 6) for n in [hole] * 9]
    assert counted(caches, "mismatches") == [0, 0]
