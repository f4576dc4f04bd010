from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import CapacityError, ClosedError, ConfigError, PluginError
from kvstore.eviction import EvictionPolicy
from kvstore.l1.cache import L1Cache
from kvstore.l1.entry import Entry
from kvstore.l1.policies.fifo import FifoPolicy
from kvstore.l1.policies.lru import LruPolicy
from kvstore.l1.policies.prefix_lru import PrefixLruPolicy
from kvstore.l1.policies.s3fifo import S3FifoPolicy
from kvstore.spec import BlockSpec

Chain = Callable[[str, int], list[bytes]]
MakeL1 = Callable[..., L1Cache]
Put = Callable[..., list[Entry]]
Content = Callable[[bytes, int], np.ndarray]


def read(l1: L1Cache, entry: Entry) -> bytes:
    return l1.pool.payload(entry.slot).tobytes()


def check_books(l1: L1Cache) -> None:
    """Every slot is free, reserved or owned by one entry; here nothing is reserved."""
    counters = l1.counters
    entries = l1._index.entries
    assert counters.resident_blocks == len(entries) == len(l1._index.policy)
    assert len({entry.slot for entry in entries.values()}) == len(entries)
    dead_pinned = counters.capacity_blocks - l1.pool.n_free - len(entries)
    assert counters.pinned_blocks == sum(1 for e in entries.values() if e.pins) + dead_pinned
    assert l1._index.idle == sum(1 for e in entries.values() if not e.pins)


def test_published_blocks_come_back_bit_for_bit(make_l1: MakeL1, chain: Chain, put: Put, content: Content) -> None:
    l1, key = make_l1(8), chain("a", 5)
    put(l1, key)
    entries = l1.pin_leading(key)

    assert [e.digest for e in entries] == key
    assert [read(l1, e) for e in entries] == [content(d, l1.spec.nbytes).tobytes() for d in key]
    l1.unpin(entries)
    check_books(l1)


def test_the_first_hole_ends_the_prefix(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(8), chain("a", 6)
    put(l1, key)
    l1.delete([key[3]])

    assert l1.leading(key) == 3
    assert l1.leading(key, 4) == 2
    assert l1.leading(key, 3) == 0
    assert l1.leading([]) == 0
    assert l1.contains(key) == [True, True, True, False, True, True]
    pinned = l1.pin_leading(key)
    assert len(pinned) == 3
    each = l1.pin_each(key)
    assert [e is not None for e in each] == l1.contains(key)
    l1.unpin(pinned)
    l1.unpin([e for e in each if e is not None])
    assert l1.counters.pinned_blocks == 0


def test_looking_pins_nothing_and_touches_no_recency(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, old, new = make_l1(8), chain("old", 4), chain("new", 4)
    put(l1, old)
    put(l1, new)
    for _ in range(10):
        assert l1.leading(old) == 4
        assert all(l1.contains(old))
        l1.unpin(l1.pin_leading(old))
    assert l1.counters.pinned_blocks == 0

    assert len(put(l1, chain("more", 4))) == 4
    assert l1.contains(old) == [False] * 4
    assert l1.contains(new) == [True] * 4


def test_a_touched_request_stays(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, old, new = make_l1(8), chain("old", 4), chain("new", 4)
    put(l1, old)
    put(l1, new)
    l1.touch([*old, *chain("unknown", 2)])
    put(l1, chain("more", 4))

    assert l1.leading(old) == 4
    assert l1.leading(new) == 0


@pytest.mark.parametrize("policy", [PrefixLruPolicy, FifoPolicy])
def test_eviction_shortens_a_prefix_from_its_tail(
    make_l1: MakeL1, chain: Chain, put: Put, policy: Callable[[], EvictionPolicy]
) -> None:
    l1, key = make_l1(6, policy), chain("a", 6)
    put(l1, key)
    for left in range(5, -1, -1):
        l1.reserve(1)
        assert l1.contains(key) == [True] * left + [False] * (6 - left)
    assert l1.counters.orphaned_bytes == 0


def test_nothing_is_evicted_while_a_slot_is_free(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(8)
    put(l1, chain("a", 4))
    with pytest.raises(ValueError, match="2 blocks and 1 slots"):
        l1.publish([(chain("b", 1)[0], None)] * 2, [0])
    put(l1, chain("a", 4))  # known blocks: their slots come back
    put(l1, chain("b", 4))

    assert l1.counters.evictions == 0
    check_books(l1)


def test_the_budget_is_never_exceeded(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(7)
    for i in range(30):
        put(l1, chain(str(i), 5))
        counters = l1.counters
        assert counters.resident_bytes == counters.resident_blocks * l1.spec.nbytes
        assert counters.resident_blocks <= counters.capacity_blocks == 7
    assert l1.counters.evictions == 30 * 5 - 7
    check_books(l1)


def test_a_request_larger_than_the_pool_gets_its_head(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 9)

    assert len(put(l1, key)) == 4
    assert l1.leading(key) == 4
    assert l1.counters.reserve_failures == 1
    assert l1.reserve(0) == []
    assert l1.counters.reserve_failures == 1


def test_pinned_blocks_survive_any_pressure(make_l1: MakeL1, chain: Chain, put: Put, content: Content) -> None:
    """A reader holds its result while everything else is evicted and L1 refilled (N12)."""
    l1, held = make_l1(6), chain("held", 3)
    put(l1, held)
    entries = l1.pin_leading(held)
    for i in range(20):
        assert len(put(l1, chain(str(i), 3))) == 3
    assert len(put(l1, chain("big", 6))) == 3

    assert [read(l1, e) for e in entries] == [content(d, l1.spec.nbytes).tobytes() for d in held]
    l1.unpin(entries)
    assert len(put(l1, chain("all", 6))) == 6  # released: the next put gets everything (C20)
    check_books(l1)


def test_10000_gets_at_three_times_the_capacity_leave_no_pin(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(10)
    keys = [chain(str(i), 3) for i in range(10)]
    for key in keys:
        put(l1, key)
    for i in range(10_000):
        l1.unpin(l1.pin_leading(keys[i % 10]))

    assert l1.counters.pinned_blocks == 0
    assert len(put(l1, chain("new", 10))) == 10


def test_an_all_pinned_pool_answers_soon(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(500)
    entries = put(l1, chain("a", 500), pins=1)
    begin = time.thread_time()
    assert l1.reserve(500) == []
    assert time.thread_time() - begin < 0.1
    l1.unpin(entries)


def test_reserve_takes_queued_writes_back_once(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(4)
    queued = put(l1, chain("queued", 3), pins=1)
    asked: list[int] = []

    def reclaim(n_blocks: int) -> int:
        asked.append(n_blocks)
        assert l1.counters.capacity_blocks == 4  # L1 is free to be used: no lock is held
        newest = [queued.pop() for _ in range(min(n_blocks, len(queued)))]
        l1.unpin(newest)
        return len(newest)

    l1.reclaim = reclaim
    slots = l1.reserve(3)

    assert len(slots) == 3
    assert asked == [2]
    assert l1.counters.reclaimed_writes == 2
    assert l1.counters.reserve_failures == 0
    assert len(l1.reserve(4)) == 1
    assert asked == [2, 4]
    assert l1.counters.reserve_failures == 1


def test_a_failing_reclaim_leaks_no_slot(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(4)
    put(l1, chain("queued", 2), pins=1)

    def reclaim(_: int) -> int:
        raise RuntimeError("the queue is gone")

    l1.reclaim = reclaim
    with pytest.raises(RuntimeError, match="queue"):
        l1.reserve(3)
    l1.reclaim = None

    assert len(l1.reserve(3)) == 2


def test_a_block_published_twice_is_one_entry(make_l1: MakeL1, chain: Chain, content: Content) -> None:
    l1, key = make_l1(8), chain("a", 2)
    first, second = l1.reserve(2), l1.reserve(2)
    for slots in (first, second):
        for slot, digest in zip(slots, key, strict=True):
            l1.pool.payload(slot)[:] = content(digest, l1.spec.nbytes)
    items = [(key[0], None), (key[1], key[0])]
    one = l1.publish(items, first, pins=1)
    two = l1.publish(items, second, pins=2)

    assert all(a is b for a, b in zip(one, two, strict=True))
    assert [e.pins for e in one] == [3, 3]
    assert l1.pool.n_free == 6
    for _ in range(3):
        l1.unpin(one)
    check_books(l1)


def test_a_block_twice_in_one_publish_is_one_entry(make_l1: MakeL1, chain: Chain) -> None:
    l1, digest = make_l1(4), chain("a", 1)[0]
    one, two = l1.publish([(digest, None)] * 2, l1.reserve(2), pins=1)

    assert one is two
    assert one.pins == 2
    l1.unpin([one, two])
    check_books(l1)


def test_a_deleted_block_is_gone_at_once_and_readable_while_pinned(
    make_l1: MakeL1, chain: Chain, put: Put, content: Content
) -> None:
    l1, key = make_l1(4), chain("a", 4)
    entries = put(l1, key, pins=1)
    assert l1.delete([*key[:2], *chain("unknown", 3)]) == 2
    assert l1.contains(key) == [False, False, True, True]
    assert l1.pool.n_free == 0
    assert l1.reserve(1) == []

    assert read(l1, entries[0]) == content(key[0], l1.spec.nbytes).tobytes()
    l1.unpin(entries)
    assert l1.pool.n_free == 2
    assert put(l1, key[:1])[0] is not entries[0]
    check_books(l1)


def test_clear_forgets_every_block_and_keeps_pinned_bytes(
    make_l1: MakeL1, chain: Chain, put: Put, content: Content
) -> None:
    l1, key = make_l1(8), chain("a", 6)
    put(l1, key)
    held = l1.pin_leading(key[:2])
    l1.clear()

    assert l1.generation == 1
    assert l1.contains(key) == [False] * 6
    assert l1.counters.resident_blocks == 0
    assert l1.counters.orphaned_bytes == 0
    assert len(put(l1, chain("b", 8))) == 6
    assert [read(l1, e) for e in held] == [content(d, l1.spec.nbytes).tobytes() for d in key[:2]]
    l1.unpin(held)
    check_books(l1)


def test_a_read_that_ends_after_clear_does_not_resurrect_its_block(
    make_l1: MakeL1, chain: Chain, content: Content
) -> None:
    l1, key = make_l1(4), chain("a", 2)
    asked_at = l1.generation
    slots = l1.reserve(2)
    for slot, digest in zip(slots, key, strict=True):
        l1.pool.payload(slot)[:] = content(digest, l1.spec.nbytes)
    l1.clear()
    entries = l1.publish([(key[0], None), (key[1], key[0])], slots, pins=1, generation=asked_at)

    assert l1.leading(key) == 0
    assert [read(l1, e) for e in entries] == [content(d, l1.spec.nbytes).tobytes() for d in key]
    assert l1.counters.pinned_blocks == 2
    l1.unpin(entries)
    assert l1.pool.n_free == 4
    l1.publish([(key[0], None)], l1.reserve(1), generation=asked_at)
    assert l1.pool.n_free == 4
    l1.publish([(key[0], None)], l1.reserve(1), generation=l1.generation)
    assert l1.leading(key) == 1


def test_a_pin_is_given_back_once(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(4)
    entries = put(l1, chain("a", 2), pins=1)
    l1.pin(entries)
    l1.unpin(entries)
    l1.unpin(entries)

    with pytest.raises(ValueError, match="unpinned more often"):
        l1.unpin(entries)
    assert l1.counters.pinned_blocks == 0
    check_books(l1)


def test_an_entry_that_has_left_cannot_be_pinned(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(4)
    (evicted,) = put(l1, chain("a", 1))
    put(l1, chain("b", 4))

    with pytest.raises(ValueError, match="cannot be pinned"):
        l1.pin([evicted])


def test_orphaned_bytes_count_children_of_evicted_parents(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4, LruPolicy), chain("a", 4)
    put(l1, key)
    assert l1.counters.orphaned_bytes == 0
    put(l1, chain("b", 1))  # plain LRU evicts the head
    assert l1.contains(key) == [False, True, True, True]

    assert l1.counters.orphaned_bytes == l1.spec.nbytes
    l1.delete(chain("b", 1))
    put(l1, key[:1])
    assert l1.counters.orphaned_bytes == 0


def test_prefix_lru_orphans_nothing_where_lru_does(make_l1: MakeL1, chain: Chain) -> None:
    rng = np.random.default_rng(5)
    requests = [chain(str(rng.zipf(1.3) % 12), int(rng.integers(1, 8))) for _ in range(200)]
    worst = {}
    for policy in (LruPolicy, PrefixLruPolicy):
        l1 = make_l1(20, policy)
        worst[policy] = 0
        for key in requests:
            held = l1.pin_leading(key)
            missing = key[len(held) :]
            slots = l1.reserve(len(missing))
            items = list(zip(key, [None, *key[:-1]], strict=True))[len(held) :]
            l1.publish(items[: len(slots)], slots)
            l1.touch(key[: len(held)])
            l1.unpin(held)
            worst[policy] = max(worst[policy], l1.counters.orphaned_bytes)

    assert worst[LruPolicy] > 0
    assert worst[PrefixLruPolicy] == 0


def test_evicted_digests_are_kept_only_when_asked_for(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(4)
    put(l1, chain("a", 4))
    put(l1, chain("b", 4))
    assert l1.drain_evicted() == []

    l1.keep_evicted(3)
    put(l1, chain("c", 4))
    b = chain("b", 4)
    assert l1.drain_evicted() == [b[2], b[1], b[0]]  # bounded: the oldest was forgotten
    assert l1.drain_evicted() == []
    l1.delete(chain("c", 1))
    assert l1.drain_evicted() == []


def test_a_policy_that_evicts_a_pinned_block_is_stopped(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    class Careless(LruPolicy):
        def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
            del evictable
            return super().evict(lambda _: True)

    l1 = make_l1(4, Careless)
    put(l1, chain("a", 4))
    l1.pin_each(chain("a", 1))

    with pytest.raises(PluginError, match="Careless evicted a block that is pinned"):
        l1.reserve(4)


def test_s3fifo_is_told_the_pool_size(spec: BlockSpec) -> None:
    told: list[int] = []

    def policy(capacity_blocks: int) -> S3FifoPolicy:
        told.append(capacity_blocks)
        return S3FifoPolicy(capacity_blocks)

    l1 = L1Cache(spec, 5 * (spec.nbytes + 4096) + 99, policy)
    assert told == [5]
    l1.close()


def test_a_closed_cache_says_so_and_close_may_be_repeated(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 2)
    entries = put(l1, key, pins=1)
    l1.close()
    l1.close()
    l1.unpin(entries)

    calls: Sequence[Callable[[], object]] = (
        lambda: l1.leading(key),
        lambda: l1.contains(key),
        lambda: l1.pin_leading(key),
        lambda: l1.pin_each(key),
        lambda: l1.reserve(1),
        lambda: l1.publish([], []),
        lambda: l1.touch(key),
        lambda: l1.delete(key),
        l1.clear,
        l1.drain_evicted,
    )
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert l1.counters.resident_blocks == 0
    assert l1.counters.pinned_blocks == 0


def test_bad_capacities_are_refused(spec: BlockSpec) -> None:
    with pytest.raises(CapacityError, match=r"l1\.capacity is 100 bytes"):
        L1Cache(spec, 100, lambda _: LruPolicy())
    with pytest.raises(ConfigError, match=r"l1\.capacity"):
        L1Cache(spec, 1 << 60, lambda _: LruPolicy())


def test_real_kv_bytes_survive_a_slot(chain: Chain) -> None:
    block = np.load(Path(__file__).parents[2] / "data" / "bf16_prose_b000_16tok_LCND.npy")
    spec = BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
    assert block.shape == spec.shape
    l1 = L1Cache(spec, 2 * (spec.nbytes + 8192), lambda _: LruPolicy())
    (slot,) = l1.reserve(1)
    l1.pool.payload(slot)[:] = block.reshape(-1).view(np.uint8)
    (entry,) = l1.publish([(chain("real", 1)[0], None)], [slot])

    assert read(l1, entry) == block.tobytes()
    l1.close()
