"""A02: one flipped bit anywhere in a stored value is a miss, and a good copy below repairs it."""

from __future__ import annotations

import random

import pytest

from kvstore.types import BlockStatus, Presence
from tests.faults.conftest import Rounds
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, WatchedCache, gauss, same, target, unrelated, untouched

N = 64


def flip(value: bytes, bit: int) -> bytes:
    changed = bytearray(value)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def bits_of(value: bytes, count: int, rng: random.Random) -> list[int]:
    """Bits of the whole value, half of them where the bookkeeping is: at its two ends."""
    ends = [*range(min(len(value), 600)), *range(max(0, len(value) - 64), len(value))]
    byte = [rng.choice(ends) if n % 2 else rng.randrange(len(value)) for n in range(count)]
    return [8 * b + rng.randrange(8) for b in byte]


@pytest.mark.parametrize("codec", ["none", "planes"])
@over("LNTS")
def test_a_flipped_bit_is_a_miss_and_leaves_the_neighbours_alone(store: Store, codec: str, rounds: Rounds) -> None:
    rng = random.Random(2)
    keys, blocks = [unrelated(i) for i in range(N)], gauss(SMALL, range(N))
    count = rounds(60, 500)
    absent = 0
    with store.open(codec=codec) as cache:
        for i, key in enumerate(keys):
            cache.put(key, blocks[i : i + 1])
        cache.flush(60)
        for round_ in range(count):
            i = rng.randrange(N)
            place = store.at(keys[i])
            good = store.read(place)
            bit = bits_of(good, 2, rng)[round_ % 2]
            store.write(place, flip(good, bit))
            out = target(SMALL)
            status = cache.get_each(keys[i], out)[0]
            assert status in {BlockStatus.CORRUPT, BlockStatus.MISMATCH, BlockStatus.ABSENT}, (bit, status)
            assert untouched(out), bit
            absent += status is BlockStatus.ABSENT
            assert cache.fetch(keys[i]) is None, bit
            assert cache.contains_each(keys[i]) == [Presence.ABSENT], bit
            neighbour = (i + 1) % N
            found = cache.fetch(keys[neighbour])
            assert found is not None, bit
            assert same(found, blocks[neighbour : neighbour + 1])
            cache.store(keys[i], blocks[i : i + 1])
        assert_exact(cache, keys, blocks)
        counters = cache.tier(TIER).counters
        noticed = counters.corrupt + counters.key_mismatch + counters.spec_mismatch
        assert noticed == count - absent
        assert absent < count // 2
        assert counters.io_errors == counters.timeouts == 0
        assert cache.peaks["get_each"] < 1


def assert_exact(cache: WatchedCache, keys: list, blocks: object) -> None:  # type: ignore[type-arg]
    for i, key in enumerate(keys):
        found = cache.fetch(key)
        assert found is not None, i
        assert same(found, blocks[i : i + 1]), i  # type: ignore[index]


@over("LNTS")
def test_a_good_copy_below_is_served_and_written_back_over_the_bad_one(store: Store) -> None:
    keys, blocks = [unrelated(i) for i in range(8)], gauss(SMALL, range(8))
    below = [{"backend": "memory", "name": "below", "codec": "none"}]
    with store.open(below=below) as cache:
        for i, key in enumerate(keys):
            cache.put(key, blocks[i : i + 1])
        cache.flush(60)
        for key in keys[:4]:
            place = store.at(key)
            store.write(place, flip(store.read(place), 8 * 3000))
        assert_exact(cache, keys, blocks)
        assert cache.tier("below").counters.hits == 4
        cache.flush(60)
        assert_exact(cache, keys, blocks)
        assert cache.tier("below").counters.hits == 4  # the upper tier has them all again
    with store.open() as cache:
        assert_exact(cache, keys, blocks)
        assert cache.tier(TIER).counters.corrupt == 0
