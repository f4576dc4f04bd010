"""A01: records that changed places are misses, never somebody else's block."""

from __future__ import annotations

import dataclasses

from kvstore.types import Presence
from tests.faults.store import TIER, Store, over
from tests.support_faults import NAMESPACE, SMALL, noise, same, unrelated


def mismatches(cache_stats: object) -> int:
    counters = cache_stats.counters  # type: ignore[attr-defined]
    return int(counters.key_mismatch)


@over("LNTS")
def test_two_records_that_changed_places_are_both_misses(store: Store) -> None:
    keys, blocks = [unrelated(i) for i in range(3)], noise(SMALL, range(3))
    with store.open() as cache:
        for key, block in zip(keys, blocks, strict=True):
            cache.store(key, block[None])
    store.swap(store.at(keys[0]), store.at(keys[1]))
    with store.open() as cache:
        assert cache.fetch(keys[0]) is None
        assert cache.fetch(keys[1]) is None
        assert mismatches(cache.tier(TIER)) == 2
        found = cache.fetch(keys[2])
        assert found is not None
        assert same(found, blocks[2:])  # the one that stayed
        assert [cache.contains_each(key) for key in keys[:2]] == [[Presence.ABSENT]] * 2
        for key, block in zip(keys[:2], blocks, strict=False):
            cache.store(key, block[None])
            found = cache.fetch(key)
            assert found is not None
            assert same(found, block[None])


@over("LNTS")
def test_values_that_changed_places_with_all_that_surrounds_them_are_misses(store: Store) -> None:
    keys, blocks = [unrelated(i) for i in range(3)], noise(SMALL, range(3))
    with store.open() as cache:
        for key, block in zip(keys, blocks, strict=True):
            cache.store(key, block[None])
    store.swap_values(store.at(keys[0]), store.at(keys[1]))
    with store.open() as cache:
        assert [cache.fetch(key) for key in keys[:2]] == [None, None]
        found = cache.fetch(keys[2])
        assert found is not None
        assert same(found, blocks[2:])
        assert [cache.contains_each(key) for key in keys[:2]] == [[Presence.ABSENT]] * 2
        cache.store(keys[0], blocks[:1])
        found = cache.fetch(keys[0])
        assert found is not None
        assert same(found, blocks[:1])


@over("LNTS")
def test_records_of_two_namespaces_that_changed_places_are_both_misses(store: Store) -> None:
    key, blocks = unrelated(0), noise(SMALL, range(2))
    spaces = [NAMESPACE, dataclasses.replace(NAMESPACE, revision="r2")]
    places: list[object] = []
    for namespace, block in zip(spaces, blocks, strict=True):
        with store.open(namespace=namespace) as cache:
            cache.store(key, block[None])
        places += [place for place in store.places() if place not in places]
    assert len(places) == 2
    store.swap(*places)
    for namespace, block in zip(spaces, blocks, strict=True):
        with store.open(namespace=namespace) as cache:
            assert cache.fetch(key) is None
            assert mismatches(cache.tier(TIER)) == 1
            assert cache.contains_each(key) == [Presence.ABSENT]
            cache.store(key, block[None])
            found = cache.fetch(key)
            assert found is not None
            assert same(found, block[None])
