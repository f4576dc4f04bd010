"""A03: a stored value of any wrong length is a miss, and the block can be stored again."""

from __future__ import annotations

import pytest

from kvstore.types import Presence
from tests.faults.store import Store, over
from tests.support_faults import SMALL, gauss, same, unrelated


def variants(store: Store, value: bytes) -> dict[str, bytes]:
    n, head_bytes = len(value), store.head_bytes(value)
    lengths = [0, 1, head_bytes - 1, head_bytes, head_bytes + 1, n - 1, n + 1, 2 * n]
    return {
        **{f"{k} of {n} bytes": store.resized(value, k) for k in lengths},
        "last 4 KiB zeroed": value[:-4096] + bytes(4096),
        "all zero": bytes(n),
    }


@pytest.mark.parametrize("codec", ["none", "planes"])
@over("LNTS")
def test_a_value_of_the_wrong_length_is_a_miss_and_can_be_replaced(store: Store, codec: str) -> None:
    keys, blocks = [unrelated(i) for i in range(3)], gauss(SMALL, range(3))
    with store.open(codec=codec) as cache:
        for i, key in enumerate(keys):
            cache.store(key, blocks[i : i + 1])
        good = store.read(store.at(keys[1]))
        for what, bad in variants(store, good).items():
            store.write(store.at(keys[1]), bad)
            assert cache.fetch(keys[1]) is None, what
            assert cache.contains_each(keys[1]) == [Presence.ABSENT], what
            assert cache.delete(keys[1]) == 0, what
            for i in (0, 2):
                found = cache.fetch(keys[i])
                assert found is not None, what
                assert same(found, blocks[i : i + 1]), what
            cache.store(keys[1], blocks[1:2])
            found = cache.fetch(keys[1])
            assert found is not None, what
            assert same(found, blocks[1:2]), what


@over("LNTS")
def test_a_value_of_the_wrong_length_is_a_miss_after_a_restart(store: Store) -> None:
    key, block = unrelated(0), gauss(SMALL, [0])
    with store.open() as cache:
        cache.store(key, block)
    good = store.read(store.at(key))
    for what, bad in variants(store, good).items():
        store.write(store.at(key), bad)
        with store.open() as cache:
            assert cache.fetch(key) is None, what
            assert cache.contains_each(key) == [Presence.ABSENT], what
            assert cache.delete(key) == 0, what
            cache.store(key, block)
            found = cache.fetch(key)
            assert found is not None, what
            assert same(found, block), what
