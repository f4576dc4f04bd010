from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.errors import PluginError
from kvstore.eviction import EvictionPolicy
from kvstore.l1.cache import L1Cache
from kvstore.l1.policies.fifo import FifoPolicy
from kvstore.l1.policies.lru import LruPolicy
from kvstore.l1.policies.prefix_lru import PrefixLruPolicy
from kvstore.l1.policies.s3fifo import S3FifoPolicy
from kvstore.spec import BlockSpec
from tests.support_l1 import Chain, Content, MakeL1, Put, check_books, read


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


def test_l1_asks_before_it_takes_slots_and_tells_what_left(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 4)
    asked: list[int] = []
    left: list[bytes] = []
    l1.before_eviction = lambda n_blocks: asked.append(n_blocks if l1.room()[0] >= 0 else -1)  # no lock is held
    l1.watch_evictions(lambda entry: left.append(entry.digest))
    put(l1, key)
    put(l1, chain("b", 3))
    l1.delete(key[:1])

    assert asked == [4, 3]
    assert left == key[:0:-1]
    assert l1.room() == (1, 3)


@pytest.mark.parametrize("policy", [PrefixLruPolicy, LruPolicy, FifoPolicy])
def test_victims_come_in_the_order_of_their_eviction(
    make_l1: MakeL1, chain: Chain, put: Put, policy: Callable[[], EvictionPolicy]
) -> None:
    l1, left = make_l1(8, policy), list[bytes]()
    for name in "abc":
        put(l1, chain(name, 2))
    l1.touch(chain("a", 2))

    first = l1.pin_victims(lambda entries: [next(entries), next(entries)])
    expected = [entry.digest for entry in first]
    l1.unpin(first)
    l1.watch_evictions(lambda entry: left.append(entry.digest))
    l1.reserve(4)  # 2 of them were free

    assert left == expected
    check_books_but_for(l1, reserved=4)


def check_books_but_for(l1: L1Cache, *, reserved: int) -> None:
    assert l1.pool.n_free + l1.counters.resident_blocks + reserved == l1.pool.n_slots


def test_victims_that_are_saved_first_do_not_leave(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 4)
    put(l1, key)

    saved = l1.pin_victims(lambda entries: [next(entries)])

    assert [entry.digest for entry in saved] == [key[3]]
    assert len(l1.reserve(4)) == 3
    assert l1.contains(key) == [False, False, False, True]
    l1.unpin(saved)
