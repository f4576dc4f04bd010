"""A12: a body that is damaged on its way is asked for once more; only what is damaged where it lies is dropped."""

from __future__ import annotations

import pytest

from kvstore.types import BlockStatus, Presence
from tests.faults.media import server_of
from tests.faults.s3_faults import Fault, Logged
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, WatchedCache, chain, noise, same, target, unrelated

CUT = [("truncate", 0.0), ("truncate", 0.5), ("truncate", 0.99999), ("reset", 0.5)]
"""Bodies that end early; with the third one only the last byte is missing."""

WRONG = [("flip", 0.0), ("flip", 0.5), ("flip", 0.99999), ("wrong_object", 0.0)]
"""Bodies of the right length; the first one is no pack at all."""

KEY, BLOCK = unrelated(0), noise(SMALL, [0])
paths = pytest.mark.parametrize("data_path", ["fast", "boto3"])


def filled(store: Store, data_path: str) -> WatchedCache:
    """A cache with a block under test and another one of the same length."""
    cache = store.open(data_path=data_path)
    cache.store(KEY, BLOCK)
    cache.store(unrelated(1), noise(SMALL, [1]))
    return cache


def bodies(store: Store) -> list[Logged]:
    """GETs of whole objects; the others look at a few bytes, or at the rest of a body that was cut."""
    return [r for r in server_of(store).requests("GET", "/kvstore/") if "range" not in r.headers]


@paths
@pytest.mark.parametrize(("mode", "fraction"), CUT + WRONG)
@over("S")
def test_a_body_damaged_once_is_delivered_exact_with_two_gets(
    store: Store, mode: str, fraction: float, data_path: str
) -> None:
    with filled(store, data_path) as cache:
        place = store.at(KEY)
        with server_of(store).faulty(Fault(mode, ("GET",), times=1, fraction=fraction, only=place)):
            found = cache.fetch(KEY)
            asked = server_of(store).requests("GET", place)
        assert found is not None
        assert same(found, BLOCK)
        assert len(asked) == 2, [(r.path, r.headers.get("range")) for r in asked]
        counters = cache.tier(TIER).counters
        assert counters.corrupt == counters.key_mismatch == counters.io_errors == 0
        assert counters.reread == (1 if (mode, fraction) in WRONG[1:] else 0)
        assert store.at(KEY) == place


@paths
@pytest.mark.parametrize(("mode", "fraction"), CUT)
@over("S")
def test_bodies_that_always_end_early_are_misses_and_delete_nothing(
    store: Store, mode: str, fraction: float, data_path: str
) -> None:
    with filled(store, data_path) as cache:
        place = store.at(KEY)
        with server_of(store).faulty(Fault(mode, ("GET",), fraction=fraction, only=place)):
            out = target(SMALL)
            assert cache.get_each(KEY, out) == [BlockStatus.UNAVAILABLE]
            assert len(server_of(store).requests("GET", place)) <= 2
            assert server_of(store).requests("DELETE") == server_of(store).requests("POST") == []
        assert store.at(KEY) == place
        found = cache.fetch(KEY)
        assert found is not None  # at once, because nothing was remembered against it
        assert same(found, BLOCK)
        counters = cache.tier(TIER).counters
        assert (counters.corrupt, counters.io_errors) == (0, 1)


@paths
@pytest.mark.parametrize(("mode", "fraction"), WRONG)
@over("S")
def test_bodies_that_are_wrong_twice_are_misses_and_the_object_goes(
    store: Store, mode: str, fraction: float, data_path: str
) -> None:
    with filled(store, data_path) as cache:
        place = store.at(KEY)
        with server_of(store).faulty(Fault(mode, ("GET",), fraction=fraction, only=place)):
            assert cache.fetch(KEY) is None
            assert len(bodies(store)) == 2
            asked = len(server_of(store).requests("GET", place))
            assert asked <= 4  # two of them look at the few bytes that tell whether it was repaired meanwhile
            for _ in range(5):
                assert cache.fetch(KEY) is None
            assert len(server_of(store).requests("GET", place)) <= asked + 2
        assert cache.contains_each(KEY) == [Presence.ABSENT]
        assert store.find(KEY[0]) is None
        cache.store(KEY, BLOCK)
        for key, block in ((KEY, BLOCK), (unrelated(1), noise(SMALL, [1]))):
            found = cache.fetch(key)
            assert found is not None
            assert same(found, block)


@over("S")
def test_a_flip_in_a_pack_costs_one_more_get_and_no_block(store: Store) -> None:
    key, blocks = chain(10, seed=12), noise(SMALL, range(10))
    with store.open() as cache:
        cache.store(key, blocks)
        place = store.places()[0]
        with server_of(store).faulty(Fault("flip", ("GET",), times=1, fraction=0.35, only=place)):
            out = target(SMALL, 10)
            assert cache.get(key, out) == 10  # the blocks behind the flip, too
            assert same(out, blocks)
        with server_of(store).faulty(Fault("flip", ("GET",), times=1, fraction=0.35, only=place)):
            out = target(SMALL, 10)
            assert cache.get_each(key, out) == [BlockStatus.DELIVERED] * 10
            assert same(out, blocks)
        assert cache.tier(TIER).counters.reread == 2
        assert cache.tier(TIER).counters.corrupt == 0


@over("S")
def test_with_a_good_copy_below_a_wrong_body_costs_nothing(store: Store) -> None:
    with store.open(below=[{"backend": "memory", "name": "below", "codec": "none"}]) as cache:
        cache.store(KEY, BLOCK)
        with server_of(store).faulty(Fault("flip", ("GET",), only=store.at(KEY))):
            found = cache.fetch(KEY)
        assert found is not None
        assert same(found, BLOCK)
        assert cache.tier("below").counters.hits == 1
        cache.flush(10)
        assert cache.tier(TIER).counters.repaired == 1
        found = cache.fetch(KEY)
        assert found is not None
        assert same(found, BLOCK)
        assert cache.tier(TIER).counters.hits == 1
