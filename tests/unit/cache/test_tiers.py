"""How blocks move between L1 and several tiers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, KVCache, Namespace
from kvstore.l1.cache import L1Cache
from tests import doubles
from tests.support import MakeKey, blocks_of, same_bytes


class Two:
    """A cache over two counting memory backends."""

    def __init__(self, spec: BlockSpec, namespace: Namespace, l1: Any) -> None:
        self.upper, self.lower = doubles.CountingBackend(), doubles.CountingBackend()
        registry, first = doubles.register(lambda: self.upper)
        registry, second = doubles.register(lambda: self.lower, registry)
        tiers = [{"backend": first, "name": "upper"}, {"backend": second, "name": "lower"}]
        self.cache = KVCache.open({"l1": l1, "l2": tiers}, spec=spec, namespace=namespace, registry=registry)

    @property
    def l1(self) -> L1Cache:
        assert self.cache._state is not None
        assert self.cache._state.stack.l1 is not None
        return self.cache._state.stack.l1

    def fill(self, key: Any, blocks: torch.Tensor) -> None:
        self.cache.put(key, blocks)
        self.cache.flush(10)

    def drop(self, backend: doubles.CountingBackend, digests: Any) -> None:
        for name in [n for n in backend._records if n[17:] in set(digests)]:
            backend._remove(name)


@pytest.fixture
def two(spec: BlockSpec, namespace: Namespace) -> Iterator[Two]:
    made = Two(spec, namespace, {"capacity": "4MiB"})
    yield made
    made.cache.close()


def test_a_put_reaches_every_tier_once(two: Two, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(5), blocks_of(spec, 5)
    two.fill(key, blocks)
    two.fill(key, blocks)

    assert len(two.upper.put_names) == len(two.lower.put_names) == 5


def test_each_tier_serves_what_the_ones_above_lack(two: Two, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(9), blocks_of(spec, 9)
    two.fill(key, blocks)
    two.l1.delete(key[3:])
    two.drop(two.upper, key[6:])
    out = torch.zeros_like(blocks)

    assert two.cache.lookup(key).by_tier == {"l1": 3, "upper": 3, "lower": 3}
    assert two.cache.get(key, out) == 9
    assert same_bytes(out, blocks)
    stats = two.cache.stats()
    assert stats.cache.l1_hits == 3
    assert [t.counters.hits for t in stats.tiers] == [3, 3]
    assert all(t.counters.lookups == t.counters.hits + t.counters.misses for t in stats.tiers)


def test_tiers_with_interleaved_holes_still_give_the_whole_prefix(two: Two, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(12), blocks_of(spec, 12)
    two.fill(key, blocks)
    two.l1.delete([d for i, d in enumerate(key) if i % 3 != 0])
    two.drop(two.upper, [d for i, d in enumerate(key) if i % 3 != 1])
    two.drop(two.lower, [d for i, d in enumerate(key) if i % 3 != 2])
    out = torch.zeros_like(blocks)

    assert two.cache.lookup(key).by_tier == {"l1": 4, "upper": 4, "lower": 4}
    assert two.cache.get(key, out) == 12
    assert same_bytes(out, blocks)
    with two.cache.acquire(key) as lease:
        assert lease.blocks == 12


def test_a_block_is_promoted_at_its_second_read_and_never_written_back(
    two: Two, spec: BlockSpec, make_key: MakeKey
) -> None:
    key, blocks = make_key(6), blocks_of(spec, 6)
    two.fill(key, blocks)
    two.l1.clear()
    out = torch.zeros_like(blocks)
    written = len(two.upper.put_names)

    assert two.cache.get(key, out) == 6
    assert two.cache.lookup(key).by_tier["l1"] == 0
    assert two.cache.get(key, out) == 6
    assert two.cache.lookup(key).by_tier["l1"] == 6
    assert two.cache.get(key, out) == 6
    two.cache.put(key, blocks)
    two.cache.flush(10)

    assert same_bytes(out, blocks)
    assert two.cache.stats().cache.promoted == 6
    assert len(two.upper.put_names) == written
    assert two.l1.counters.pinned_blocks == 0


@pytest.mark.parametrize("read", ["acquire", "prefetch"])
def test_acquire_and_prefetch_promote_at_once(two: Two, spec: BlockSpec, make_key: MakeKey, read: str) -> None:
    key, blocks = make_key(6), blocks_of(spec, 6)
    two.fill(key, blocks)
    two.l1.clear()

    if read == "acquire":
        with two.cache.acquire(key) as lease:
            assert all(same_bytes(t, b) for t, b in zip(lease.tensors, blocks, strict=True))
    else:
        assert two.cache.prefetch(key).result(10) == 6

    assert two.cache.lookup(key).by_tier == {"l1": 6, "upper": 0, "lower": 0}
    assert two.l1.counters.pinned_blocks == 0


def test_uses_are_told_to_the_tier_tail_first(two: Two, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(6), blocks_of(spec, 6)
    two.fill(key, blocks)
    two.l1.clear()

    two.cache.get(key, torch.zeros_like(blocks))

    assert [name[17:] for name in two.upper.touched[-1]] == list(key)[::-1]


def test_records_are_put_tail_first_so_that_heads_are_the_youngest(
    two: Two, spec: BlockSpec, make_key: MakeKey
) -> None:
    key = make_key(6)
    two.fill(key, blocks_of(spec, 6))

    assert [name[17:] for name in two.upper.put_names] == list(key)[::-1]


def test_a_block_that_a_medium_evicted_is_stored_again_by_the_next_put(
    spec: BlockSpec, namespace: Namespace, make_key: MakeKey
) -> None:
    registry, name = doubles.register(doubles.CountingBackend)
    config = {"l1": {"capacity": "8MiB"}, "l2": [{"backend": name, "capacity": 10 * (spec.nbytes + 1024)}]}
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        old, new = make_key(8, seed=1), make_key(8, seed=2)
        cache.put(old, blocks_of(spec, 8, seed=1))
        cache.flush(10)
        cache.put(new, blocks_of(spec, 8, seed=2))
        cache.flush(10)
        assert cache.stats().tiers[0].counters.evicted > 0

        cache.put(old, blocks_of(spec, 8, seed=1))
        cache.flush(10)

        assert cache._state is not None
        cache._state.stack.l1.clear()  # type: ignore[union-attr]
        assert cache.lookup(old).blocks == 8


def test_a_lease_survives_delete_clear_and_refill(two: Two, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(4), blocks_of(spec, 4)
    two.fill(key, blocks)
    with two.cache.acquire(key) as lease:
        two.cache.delete(key)
        two.cache.clear()
        for seed in range(1, 6):
            two.cache.put(make_key(40, seed=seed), blocks_of(spec, 40, seed=seed))
        assert all(same_bytes(t, b) for t, b in zip(lease.tensors, blocks, strict=True))
        assert two.cache.lookup(key).blocks == 0
    two.cache.flush(10)
    assert two.l1.counters.pinned_blocks == 0


def test_a_put_larger_than_l1_accepts_a_prefix(two: Two, spec: BlockSpec, make_key: MakeKey) -> None:
    slots = two.l1.pool.n_slots
    key = make_key(slots + 20)

    assert two.cache.put(key, blocks_of(spec, slots + 20)) == slots
    assert two.cache.lookup(key).blocks == slots


def test_a_cancelled_prefetch_says_so(two: Two, spec: BlockSpec, make_key: MakeKey) -> None:
    future = two.cache.prefetch(make_key(2))
    cancelled = future.cancel()
    assert cancelled == future.cancelled()
    assert cancelled or future.result(5) == 0


def test_writes_queued_before_a_clear_do_not_come_back(
    spec: BlockSpec, namespace: Namespace, make_key: MakeKey
) -> None:
    backend = doubles.GatedWrites()
    registry, name = doubles.register(lambda: backend)
    config = {"l1": {"capacity": "4MiB"}, "l2": [{"backend": name}]}
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        backend.gate.clear()
        key, blocks = make_key(3), blocks_of(spec, 3)
        cache.put(key, blocks)
        assert backend.writing.wait(5)

        cache.clear()
        backend.gate.set()
        cache.flush(10)

        assert cache.lookup(key).blocks == 0
        cache.put(key, blocks)
        cache.flush(10)
        assert cache.lookup(key).blocks == 3


def test_deleting_a_queued_block_drops_its_write(spec: BlockSpec, namespace: Namespace, make_key: MakeKey) -> None:
    backend = doubles.GatedWrites()
    registry, name = doubles.register(lambda: backend)
    config = {"l1": {"capacity": "4MiB"}, "l2": [{"backend": name, "deadline": "2s"}]}
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        backend.gate.clear()
        cache.put(make_key(1), blocks_of(spec, 1))
        assert backend.writing.wait(5)
        key = make_key(3, seed=1)
        cache.put(key, blocks_of(spec, 3))

        assert cache.delete(key) == 3

        backend.gate.set()
        cache.flush(10)
        assert cache.lookup(key).blocks == 0
        assert cache.stats().tiers[0].counters.stores_dropped == 3


def test_observers_get_events_in_batches_and_their_errors_hurt_nobody(
    spec: BlockSpec, namespace: Namespace, make_key: MakeKey
) -> None:
    from types import ModuleType

    from kvstore import hookimpl
    from kvstore.events import CacheEvent, CacheInfo

    seen: list[CacheEvent] = []
    opened: list[CacheInfo] = []
    module = ModuleType("observing")

    @hookimpl
    def kvstore_cache_opened(cache_info: CacheInfo) -> None:
        opened.append(cache_info)

    @hookimpl
    def kvstore_events(events: list[CacheEvent]) -> None:
        seen.extend(events)
        raise RuntimeError("an observer's bug")

    module.kvstore_cache_opened = kvstore_cache_opened  # type: ignore[attr-defined]
    module.kvstore_events = kvstore_events  # type: ignore[attr-defined]
    registry, name = doubles.register(doubles.CountingBackend)
    registry.register(module, "observing")
    config = {"l1": {"capacity": "4MiB"}, "l2": [{"backend": name, "name": "mem"}]}
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        key, absent = make_key(3), make_key(2, seed=1)
        cache.put(key, blocks_of(spec, 3))
        cache.flush(10)
        cache.get(absent, blocks_of(spec, 2))

    missed = [event for event in seen if event.kind == "miss"]
    assert {digest for event in missed for digest in event.digests} == set(absent)
    assert [info.tiers for info in opened] == [("l1", "mem")]
    stored = [event for event in seen if event.kind == "stored"]
    assert {digest for event in stored for digest in event.digests} == set(key)
    assert {event.tier for event in stored} == {"mem"}


def test_a_tier_for_hot_blocks_takes_them_at_their_second_use(
    spec: BlockSpec, namespace: Namespace, make_key: MakeKey
) -> None:
    registry, name = doubles.register(doubles.CountingBackend)
    config = {"l1": {"capacity": "8MiB"}, "l2": [{"backend": name, "name": "hot", "admit": "hot"}]}
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        once, put_twice, read = make_key(3, seed=1), make_key(3, seed=2), make_key(3, seed=3)
        for key in (once, put_twice, read):
            cache.put(key, blocks_of(spec, 3))
        cache.flush(10)
        assert cache.stats().tiers[0].counters.stored == 0

        cache.put(put_twice, blocks_of(spec, 3))
        assert cache.get(read, torch.zeros_like(blocks_of(spec, 3))) == 3
        cache.flush(10)

        assert cache.stats().tiers[0].counters.stored == 6
        present = cache._state.stack.tiers[0].tier.leading(once)  # type: ignore[union-attr]
        assert present == 0


@pytest.mark.parametrize("tiers", [1, 2])
def test_a_raw_record_leaves_l1_as_one_buffer_for_the_first_tier_that_wants_it(
    spec: BlockSpec, namespace: Namespace, make_key: MakeKey, tiers: int
) -> None:
    registry, names, backends = None, [], []
    for _ in range(tiers):
        backends.append(doubles.CountingBackend())
        registry, name = doubles.register(lambda backend=backends[-1]: backend, registry)  # type: ignore[misc]
        names.append(name)
    config = {"l1": {"capacity": "4MiB"}, "l2": [{"backend": name, "codec": "none"} for name in names]}
    key, blocks = make_key(3), blocks_of(spec, 3)
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        cache.put(key, blocks)
        cache.flush(10)
        assert cache._state is not None
        for backend in backends:  # each tier alone has the right bytes, whoever had the header page
            cache._state.stack.l1.clear()  # type: ignore[union-attr]
            out = torch.zeros_like(blocks)
            assert cache.get(key, out) == 3
            assert same_bytes(out, blocks)
            backend._records.clear()

    one_segment_head = 192 + 16
    gathered, whole = (2, 0), (1, one_segment_head)
    first, *others = [backend.put_shapes for backend in backends]
    assert first[:3] == [whole] * 3
    assert all(shape in (gathered, whole) for shapes in others for shape in shapes)


def test_a_promotion_never_costs_a_queued_write(spec: BlockSpec, namespace: Namespace, make_key: MakeKey) -> None:
    backend = doubles.GatedWrites()
    registry, name = doubles.register(lambda: backend)
    slots = 12
    config = {
        "l1": {"capacity": slots * (spec.nbytes + 4096)},
        "l2": [{"backend": name, "queue": 100 * spec.nbytes}],
    }
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        stored, blocks = make_key(4), blocks_of(spec, 4)
        cache.put(stored, blocks)
        cache.flush(10)
        backend.writing.clear()
        backend.gate.clear()
        cache.put(make_key(slots, seed=1), blocks_of(spec, slots))
        assert backend.writing.wait(5)
        out = torch.zeros_like(blocks)

        assert cache.get(stored, out) == cache.get(stored, out) == 4
        assert cache.acquire(stored).blocks == 0

        assert same_bytes(out, blocks)
        assert cache.stats().tiers[0].counters.stores_dropped == 0
        backend.gate.set()
        cache.flush(10)
        assert cache.stats().tiers[0].counters.stored == 4 + slots
