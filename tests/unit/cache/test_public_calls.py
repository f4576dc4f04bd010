"""Every public call, with both kinds of keys, with L1 and without, over each local backend."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import BlockHashKey, BlockSpec, BlockStatus, ClosedError, KVCache, KVCacheKey, Presence, TokenKey
from tests.support import KEY_KINDS, KEY_TYPES, KeyKind, MakeKey, OpenCache, blocks_of, key_of, same_bytes


@pytest.fixture(params=["lmdb", "memory", "lmdb without L1"])
def cache(request: pytest.FixtureRequest, open_cache: OpenCache, tmp_path: Path) -> KVCache:
    tier: dict[str, Any] = {"backend": "memory", "capacity": "64MiB"}
    if request.param.startswith("lmdb"):
        tier = {"backend": "lmdb", "capacity": "64MiB", "path": str(tmp_path / "store")}
    l1 = {"enabled": False} if request.param.endswith("without L1") else {"capacity": "8MiB"}
    return open_cache({"l1": l1, "l2": [tier]})


def test_put_then_get_returns_the_same_bytes(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(12), blocks_of(spec, 12)

    assert cache.put(key, blocks) == 12
    cache.flush(10)
    out = torch.zeros_like(blocks)

    assert cache.get(key, out) == 12
    assert same_bytes(out, blocks)


def test_a_sequence_of_tensors_is_as_good_as_one(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(5), blocks_of(spec, 5)

    cache.put(key, list(blocks.unbind(0)))
    cache.flush(10)
    out = [torch.zeros(spec.shape, dtype=torch.bfloat16) for _ in range(5)]

    assert cache.get(key, out) == 5
    assert same_bytes(torch.stack(out), blocks)


def test_lookup_counts_the_leading_blocks(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key = make_key(10)
    head, tail = key.split(6)

    cache.put(head, blocks_of(spec, 6))
    cache.flush(10)
    found = cache.lookup(key)

    assert (found.blocks, found.tokens) == (6, 96)
    assert sum(found.by_tier.values()) == 6
    assert cache.lookup(tail).blocks == 0


def test_a_suffix_can_be_stored_and_read_alone(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    _, tail = make_key(10).split(6)
    blocks = blocks_of(spec, 4)

    cache.put(tail, blocks)
    cache.flush(10)
    out = torch.zeros_like(blocks)

    assert cache.get(tail, out) == 4
    assert same_bytes(out, blocks)


def test_a_hole_ends_the_prefix_and_leaves_the_rest_untouched(
    cache: KVCache, spec: BlockSpec, make_key: MakeKey
) -> None:
    key, blocks = make_key(10), blocks_of(spec, 10)
    cache.put(key, blocks)
    cache.flush(10)

    assert cache.delete(key[3:4]) == 1
    out = torch.full_like(blocks, 7.0)
    untouched = out.clone()

    assert cache.lookup(key).blocks == 3
    assert cache.get(key, out) == 3
    assert same_bytes(out[:3], blocks[:3])
    assert same_bytes(out[3:], untouched[3:])


def test_each_calls_see_beyond_a_hole(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(6), blocks_of(spec, 6)
    cache.put(key, blocks)
    cache.flush(10)
    cache.delete(key[2:3])
    out = torch.full_like(blocks, 7.0)
    untouched = out.clone()

    present = cache.contains_each(key)
    statuses = cache.get_each(key, out)

    assert present == [Presence.ABSENT if i == 2 else Presence.PRESENT for i in range(6)]
    assert statuses == [BlockStatus.ABSENT if i == 2 else BlockStatus.DELIVERED for i in range(6)]
    assert same_bytes(out[2], untouched[2])
    assert all(same_bytes(out[i], blocks[i]) for i in (0, 1, 3, 4, 5))


def test_acquire_gives_the_stored_bytes_in_place(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    if not cache.config.l1.enabled:
        with pytest.raises(ValueError, match=r"acquire\(\) needs L1"):
            cache.acquire(make_key(1))
        return
    key, blocks = make_key(4), blocks_of(spec, 4)
    cache.put(key, blocks)

    with cache.acquire(key) as lease:
        assert lease.blocks == 4
        assert all(same_bytes(t, b) for t, b in zip(lease.tensors, blocks, strict=True))


def test_a_committed_allocation_is_stored_and_an_abandoned_one_is_not(
    cache: KVCache, spec: BlockSpec, make_key: MakeKey
) -> None:
    if not cache.config.l1.enabled:
        with pytest.raises(ValueError, match=r"allocate\(\) needs L1"):
            cache.allocate(make_key(1))
        return
    key, other, blocks = make_key(3), make_key(3, seed=1), blocks_of(spec, 3)

    with cache.allocate(key) as reservation:
        for tensor, block in zip(reservation.tensors, blocks, strict=True):
            tensor.copy_(block)
        reservation.commit()
    with cache.allocate(other):
        pass
    cache.flush(10)
    out = torch.zeros_like(blocks)

    assert cache.get(key, out) == 3
    assert same_bytes(out, blocks)
    assert cache.lookup(other).blocks == 0


def test_prefetch_brings_blocks_into_l1(open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(8), blocks_of(spec, 8)
    with open_cache() as first:
        first.put(key, blocks)
    second = open_cache()
    assert second.lookup(key).by_tier == {"l1": 0, "lmdb": 8}

    assert second.prefetch(key).result(10) == 8

    assert second.lookup(key).by_tier == {"l1": 8, "lmdb": 0}
    out = torch.zeros_like(blocks)
    assert second.get(key, out) == 8
    assert same_bytes(out, blocks)


def test_clear_empties_everything(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(4), blocks_of(spec, 4)
    cache.put(key, blocks)
    cache.flush(10)

    cache.clear()

    assert cache.lookup(key).blocks == 0
    assert cache.get(key, torch.zeros_like(blocks)) == 0
    cache.put(key, blocks)
    cache.flush(10)
    assert cache.lookup(key).blocks == 4


def test_stats_add_up_and_health_is_ok(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(7), blocks_of(spec, 7)
    cache.put(key, blocks)
    cache.flush(10)
    cache.get(key, torch.zeros_like(blocks))
    cache.get(make_key(3, seed=9), torch.zeros_like(blocks[:3]))

    stats = cache.stats()

    assert (stats.cache.lookups, stats.cache.hits, stats.cache.misses) == (10, 7, 3)
    tier = stats.tiers[0].counters
    assert tier.lookups == tier.hits + tier.misses
    assert stats.cache.hits == stats.cache.l1_hits + tier.hits
    assert tier.stored == 7
    assert stats.to_dict()["cache"]["hits"] == 7
    assert cache.health().state == "ok"


def test_stats_and_health_are_json_for_programs(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    cache.put(make_key(7), blocks_of(spec, 7))
    cache.flush(10)

    stats, health = json.loads(cache.stats().to_json()), json.loads(cache.health().to_json())

    assert stats["tiers"][0]["counters"]["stored"] == 7
    assert stats["l1"] == cache.stats().to_dict()["l1"]
    assert health == cache.health().to_dict()
    assert health["tiers"].keys() == {tier["name"] for tier in stats["tiers"]}


def test_an_empty_key_is_no_work(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, nothing = make_key(0), torch.zeros((0, *spec.shape), dtype=torch.bfloat16)

    assert cache.put(key, nothing) == 0
    assert cache.get(key, nothing) == 0
    assert cache.lookup(key).blocks == 0
    assert cache.get_each(key, nothing) == []
    assert cache.contains_each(key) == []
    assert cache.delete(key) == 0


def test_a_closed_cache_says_so(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key = make_key(1)
    cache.close()
    cache.close()

    with pytest.raises(ClosedError, match=r"is closed; open a cache again"):
        cache.put(key, blocks_of(spec, 1))


def test_every_public_call_takes_this_kind_of_key(
    cache: KVCache, spec: BlockSpec, make_key: MakeKey, key_kind: KeyKind
) -> None:
    """The list of calls comes from the class, so a new call must be added here."""
    key, other, blocks = make_key(4), make_key(2, seed=3), blocks_of(spec, 4)
    assert type(key) is KEY_TYPES[key_kind]
    out = torch.zeros_like(blocks)
    has_l1 = cache.config.l1.enabled
    called: dict[str, object] = {}

    def note(call: str, result: object = None) -> None:
        called[call] = result

    note("put", cache.put(key, blocks))
    cache.flush(10)
    note("flush")
    note("lookup", cache.lookup(key).blocks)
    note("get", cache.get(key, out))
    note("contains_each", cache.contains_each(key))
    note("get_each", cache.get_each(key, out))
    note("submit_get", cache.submit_get(key, out).wait(10))
    note("stream", [group.n_blocks for group in cache.stream(key)])
    note("explain", [(report.present, report.reachable) for report in cache.explain(key)])
    note("stats", cache.stats().cache.puts)
    note("health", cache.health().state)
    cache.note_prefill(64, 1.0)
    note("note_prefill")
    if has_l1:
        note("prefetch", cache.prefetch(key).result(10))
        with cache.acquire(key) as lease:
            note("acquire", lease.blocks)
        with cache.allocate(other) as reservation:
            note("allocate", reservation.blocks)
    note("delete", cache.delete(key))
    cache.clear()
    note("clear")
    cache.close()
    note("close")

    public = {name for name, _ in inspect.getmembers(KVCache, inspect.isfunction) if not name.startswith("_")}
    assert set(called) == public - (set() if has_l1 else {"prefetch", "acquire", "allocate"})
    counts = {name: called[name] for name in ("put", "lookup", "get", "submit_get", "delete", "stats")}
    assert counts == dict.fromkeys(counts, 4)
    assert called["stream"] == [4]
    assert called["explain"] == [(True, True)] * 4
    assert called["contains_each"] == [Presence.PRESENT] * 4
    assert called["get_each"] == [BlockStatus.DELIVERED] * 4
    assert same_bytes(out, blocks)


def test_the_parametrisation_covers_both_kinds_of_keys() -> None:
    assert {type(key_of(kind, 1)) for kind in KEY_KINDS} == {TokenKey, BlockHashKey}
    assert {TokenKey, BlockHashKey} == set(KVCacheKey.__subclasses__())
