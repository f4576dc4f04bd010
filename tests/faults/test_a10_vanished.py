"""A10: stored values that vanish behind the index are misses once, are forgotten, and stop nothing."""

from __future__ import annotations

import time

from kvstore.types import Presence
from tests.faults.media import server_of
from tests.faults.store import MIB, TIER, Store, over
from tests.support_faults import LARGE, SMALL, WatchedCache, noise, same, unrelated


def records_become(cache: WatchedCache, expected: int) -> bool:
    """Whether the tier's own count is right after its next upkeep; some media do not count."""
    deadline = time.monotonic() + 3
    while (found := cache.tier(TIER).records) not in {expected, -1} and time.monotonic() < deadline:
        time.sleep(0.05)
    return found in {expected, -1}


@over("LNTS")
def test_what_vanished_is_a_miss_then_absent_and_can_be_stored_again(store: Store) -> None:
    n = 20
    blocks = noise(SMALL, range(n))
    with store.open(codec="none") as cache:
        for i in range(n):
            cache.store(unrelated(i), blocks[i : i + 1])
        for i in range(0, n, 2):
            store.remove(store.at(unrelated(i)))
        for i in range(n):
            cache.contains_each(unrelated(i))  # may still say yes for what vanished
            found = cache.fetch(unrelated(i))
            assert (found is None) == (i % 2 == 0), i
            assert found is None or same(found, blocks[i : i + 1]), i
            assert cache.contains_each(unrelated(i)) == [Presence.PRESENT if i % 2 else Presence.ABSENT], i
        assert records_become(cache, n // 2)
        assert cache.delete(unrelated(0)) == 0
        for i in range(0, n, 2):
            cache.store(unrelated(i), blocks[i : i + 1])
            found = cache.fetch(unrelated(i))
            assert found is not None, i
            assert same(found, blocks[i : i + 1]), i
        assert cache.tier(TIER).counters.io_errors == 0


@over("S")
def test_asking_fifty_times_for_what_vanished_costs_two_requests(store: Store) -> None:
    with store.open() as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
        place = store.at(unrelated(0))
        store.remove(place)
        server_of(store).log.clear()
        for _ in range(50):
            assert cache.fetch(unrelated(0)) is None
        asked = [r for r in server_of(store).requests("", place) if r.method in {"GET", "HEAD"}]
        assert len(asked) <= 2 * (1 + int(cache.peaks["get"])), [(r.method, r.at) for r in asked]
        cache.store(unrelated(0), noise(SMALL, [0]))
        found = cache.fetch(unrelated(0))
        assert found is not None  # the remembered absence ended with the put
        assert same(found, noise(SMALL, [0]))


@over("LNT")
def test_evicting_what_vanished_is_no_error_and_new_blocks_fit(store: Store) -> None:
    n = 20
    with store.open(spec=LARGE, capacity=48 * MIB) as cache:
        for i in range(n):
            cache.store(unrelated(i), noise(LARGE, [i]))
        for i in range(0, n, 2):
            place = store.find(unrelated(i)[0])
            if place is not None:
                store.remove(place)
        for i in range(100, 100 + n):  # the medium is full: these push the others out
            cache.store(unrelated(i), noise(LARGE, [i]))
        tier = cache.tier(TIER)
        assert tier.counters.refused_medium == tier.counters.io_errors == 0
        assert tier.counters.stored == 2 * n
        there = 0
        for i in [*range(n), *range(100, 100 + n)]:
            found = cache.fetch(unrelated(i))
            assert found is None or same(found, noise(LARGE, [i])), i
            there += found is not None
        assert there >= 10
        assert cache.fetch(unrelated(99 + n)) is not None
        assert records_become(cache, there)
        assert store.used_bytes() <= store.bound(48 * MIB)
