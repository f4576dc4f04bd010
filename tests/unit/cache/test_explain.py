"""Causes that only a backend on purpose brings about, the causes of L1, and the bounds of an explanation."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvstore import BlockSpec, Cause, KVCache, KVCacheKey, Namespace, TierReport
from kvstore import inspection as inspection_module
from kvstore.errors import BackendUnavailableError
from kvstore.memory_backend import MemoryBackend
from kvstore.other_namespaces import MOST_ASKED
from kvstore.testing.doubles import FaultyBackend, HangingBackend, RecordingBackend
from kvstore.types import PutStatus
from tests import doubles
from tests.support import MakeKey, OpenCache, OpenDouble, blocks_of, same_bytes


def column(cache: KVCache, key: KVCacheKey, at: int = -1) -> list[TierReport]:
    """What one source says of each block; L1 is the first one."""
    return [report.tiers[at] for report in cache.explain(key)]


def only(cache: KVCache, key: KVCacheKey, cause: Cause, at: int = -1) -> TierReport:
    found = column(cache, key, at)
    assert {cell.cause for cell in found} == {cause}, found
    return found[0]


def store(cache: KVCache, key: KVCacheKey) -> torch.Tensor:
    blocks = blocks_of(cache.spec, len(key))
    cache.put(key, blocks)
    cache.flush(10)
    return blocks


def slots_of(cache: KVCache) -> int:
    l1 = cache.stats().l1
    assert l1 is not None
    return l1.capacity_blocks


def test_a_queued_block_is_queued_until_it_is_present(open_double: OpenDouble, make_key: MakeKey) -> None:
    backend = doubles.GatedWrites()
    cache, key = open_double(lambda: backend), make_key(4)
    backend.gate.clear()
    cache.put(key, blocks_of(cache.spec, 4))
    assert backend.writing.wait(10)
    only(cache, key, Cause.QUEUED)
    backend.gate.set()
    cache.flush(10)
    only(cache, key, Cause.PRESENT)


def test_a_write_taken_back_for_l1_is_dropped(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    backend = doubles.GatedWrites()
    cache = open_double(lambda: backend, l1={"capacity": 4 * spec.nbytes + (64 << 10)}, queue="8MiB")
    slots = slots_of(cache)
    backend.gate.clear()
    first = make_key(1)
    cache.put(first, blocks_of(spec, 1))
    assert backend.writing.wait(10)  # this one is under way and stays
    waiting = make_key(slots - 1, seed=1)
    cache.put(waiting, blocks_of(spec, slots - 1))
    cache.put(make_key(1, seed=2), blocks_of(spec, 1))
    assert cache.stats().tiers[0].counters.stores_dropped == 1
    found = column(cache, waiting)
    assert [cell.cause for cell in found] == [Cause.QUEUED] * (slots - 2) + [Cause.DROPPED]
    backend.gate.set()


@pytest.mark.parametrize("status", [s for s in PutStatus if s not in (PutStatus.STORED, PutStatus.EXISTS)])
def test_every_refusal_is_told_with_its_status_and_a_remedy(
    open_double: OpenDouble, make_key: MakeKey, status: PutStatus
) -> None:
    backend = FaultyBackend(MemoryBackend(), put_many=status)
    cache, key = open_double(lambda: backend), make_key(3)
    store(cache, key)
    texts = {only(cache, key, Cause.REFUSED).detail}
    backend.failing = False
    store(cache, key)
    only(cache, key, Cause.PRESENT)
    assert not any(f"refused as {status.value}" in text for text in texts), "no remedy is told for it"


def test_a_suspended_tier_is_down_and_is_not_asked(open_double: OpenDouble, make_key: MakeKey) -> None:
    error = BackendUnavailableError("the disk is gone")
    backend = RecordingBackend(FaultyBackend(MemoryBackend(), exists_many=error, get_many=error))
    cache, key = open_double(lambda: backend), make_key(3)
    for _ in range(6):
        cache.get(key, torch.zeros(3, *cache.spec.shape, dtype=torch.bfloat16))
    asked = backend.operations.count("exists_many"), backend.operations.count("get_many")
    assert "the disk is gone" in only(cache, key, Cause.TIER_DOWN).detail
    assert asked == (backend.operations.count("exists_many"), backend.operations.count("get_many"))


def test_a_tier_that_hangs_leaves_time_for_those_behind_it(
    spec: BlockSpec, namespace: Namespace, make_key: MakeKey
) -> None:
    registry, slow = doubles.register(lambda: hanging)
    registry, good = doubles.register(MemoryBackend, registry)
    hanging = HangingBackend(doubles.PooledBackend(), ["exists_many"])
    hanging.release()
    tiers = [{"name": "slow", "backend": slow, "admit": "all"}, {"name": "good", "backend": good, "admit": "all"}]
    config = {"l1": {"enabled": False}, "defaults": {"deadline": 1.0}, "l2": tiers}
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        key = make_key(2)
        store(cache, key)
        hanging.hang()
        started = time.monotonic()
        reports = cache.explain(key)
        assert time.monotonic() - started < 3
        assert [[cell.cause for cell in report.tiers[1:]] for report in reports] == [
            [Cause.NO_ANSWER, Cause.PRESENT]
        ] * 2
        assert all(report.reachable for report in reports)
        hanging.release()


# -- L1


def small_l1(open_cache: OpenCache, spec: BlockSpec) -> KVCache:
    """Memory behind an L1 of a few blocks."""
    backend = {"backend": "memory", "capacity": "64MiB", "queue": "8MiB"}
    return open_cache({"l1": {"capacity": 4 * spec.nbytes + (64 << 10)}, "l2": [backend]})


def test_l1_tells_what_became_of_its_blocks(open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey) -> None:
    cache = small_l1(open_cache, spec)
    slots = slots_of(cache)
    old, new = make_key(slots), make_key(slots, seed=1)
    store(cache, old)
    only(cache, old, Cause.PRESENT, 0)
    store(cache, new)
    assert "l1.capacity" in only(cache, old, Cause.EVICTED, 0).detail
    only(cache, make_key(2, seed=2), Cause.NOT_STORED, 0)
    cache.delete(new[:1])
    assert only(cache, new[:1], Cause.DELETED, 0).at is not None
    cache.clear()
    only(cache, new[1:], Cause.CLEARED, 0)
    store(cache, new)
    only(cache, new, Cause.PRESENT, 0)


def test_a_block_that_came_back_to_l1_and_was_deleted_there_is_deleted_and_not_evicted(
    open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey
) -> None:
    cache = small_l1(open_cache, spec)
    old, new = make_key(slots_of(cache)), make_key(slots_of(cache), seed=1)
    store(cache, old)
    store(cache, new)
    store(cache, old)
    cache.delete(old[:1])
    only(cache, old[:1], Cause.DELETED, 0)
    store(cache, old)
    store(cache, new)
    only(cache, old[:1], Cause.EVICTED, 0)


def test_a_put_into_an_l1_full_of_leases_is_refused_everywhere(
    open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey
) -> None:
    cache = small_l1(open_cache, spec)
    held, late = make_key(slots_of(cache)), make_key(2, seed=1)
    store(cache, held)
    with cache.acquire(held):
        assert cache.put(late, blocks_of(spec, 2)) == 0
    assert "leases" in only(cache, late, Cause.REFUSED, 0).detail
    assert "leases" in only(cache, late, Cause.REFUSED).detail
    store(cache, late)
    only(cache, late, Cause.PRESENT)


def test_l1_keeps_a_block_at_the_second_read_and_says_so(
    open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey
) -> None:
    key = make_key(2)
    with open_cache() as writer:
        blocks = store(writer, key)
    cache = open_cache()
    out = torch.zeros_like(blocks)
    assert cache.get(key, out) == 2
    assert "second read" in only(cache, key, Cause.NOT_ADMITTED, 0).detail
    assert cache.get(key, out) == 2
    only(cache, key, Cause.PRESENT, 0)
    assert same_bytes(out, blocks)


# -- bounds


def test_what_was_not_read_says_so(open_double: OpenDouble, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, key = open_double(doubles.PooledBackend), make_key(6)
    store(cache, key)
    monkeypatch.setattr(inspection_module, "READ_BYTES", 2 * cache.spec.nbytes)
    details = [cell.detail for cell in column(cache, key)]
    assert ["not read" in detail for detail in details] == [False] * 2 + [True] * 4


def test_other_namespaces_are_asked_up_to_a_bound_the_most_similar_first(
    open_cache: OpenCache, namespace: Namespace, make_key: MakeKey
) -> None:
    key = make_key(3)
    for i in range(MOST_ASKED + 5):
        open_cache(namespace=Namespace(model=f"other/{i}", revision="r0")).close()
    with open_cache(namespace=replace(namespace, revision="r0")) as similar:
        store(similar, key)
    cache = open_cache()
    assert "revision: 'r1' here, 'r0' there" in only(cache, key, Cause.NAMESPACE_DIFFERS).detail


def test_descriptions_that_are_none_are_passed_over(
    open_cache: OpenCache, namespace: Namespace, make_key: MakeKey, tmp_path: Path
) -> None:
    cache, key = open_cache(), make_key(2)
    folder = tmp_path / "store" / "namespaces"
    for name, text in {
        "a": "no json",
        "b": "[]",
        "c": '{"digest": "00"}',
        "d": '{"digest": "zz"}',
        "e": "[" * 9000,
    }.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "f.json").write_text(json.dumps({"digest": "ab" * 16, "identity": 1}))
    (folder / "g.json").symlink_to("/etc/passwd")
    (folder / "h.json").write_bytes(bytes(1 << 20))
    only(cache, key, Cause.NOT_STORED)
    with open_cache(namespace=replace(namespace, revision="r0")) as other:
        store(other, key)
    only(cache, key, Cause.NAMESPACE_DIFFERS)


def test_a_key_without_blocks_has_no_reports(open_cache: OpenCache, make_key: MakeKey) -> None:
    assert open_cache().explain(make_key(0)) == []


def test_a_long_prompt_of_another_namespace_is_explained_to_its_end(
    open_cache: OpenCache, namespace: Namespace, spec: BlockSpec, make_key: MakeKey
) -> None:
    key = make_key(100)
    with open_cache(namespace=replace(namespace, revision="r0")) as other:
        for start in range(0, 100, 20):
            store(other, key[start : start + 20])
    only(open_cache(), key, Cause.NAMESPACE_DIFFERS)


def test_what_a_put_evicts_of_itself_is_evicted(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    cache, key = open_double(MemoryBackend, capacity=3 * (spec.nbytes + 300)), make_key(8)
    store(cache, key)
    causes = [cell.cause for cell in column(cache, key)]
    assert causes.count(Cause.EVICTED) == 5  # which ones depends on how the writer cuts its batches
    assert set(causes) <= {Cause.EVICTED, Cause.PRESENT, Cause.BEHIND_A_HOLE}


def test_a_block_on_its_way_in_never_counts_as_vanished(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    cache = open_double(MemoryBackend)
    blocks = blocks_of(spec, 2)
    keys = [make_key(2, seed=seed) for seed in range(150)]
    newest = threading.Semaphore(0)
    done = threading.Event()
    seen: set[Cause] = set()

    def look() -> None:
        at = 0
        while newest.acquire(timeout=10) and not done.is_set():
            seen.update(cell.cause for cell in column(cache, keys[at]))
            at += 1

    thread = threading.Thread(target=look)
    thread.start()
    for key in keys:
        newest.release()
        cache.put(key, blocks)
    done.set()
    newest.release()
    thread.join(30)
    assert seen <= {Cause.NOT_STORED, Cause.QUEUED, Cause.PRESENT, Cause.BEHIND_A_HOLE}
    assert seen
