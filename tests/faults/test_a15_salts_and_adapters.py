"""A15: salts, adapters and extras never run into each other, in the store as in the key."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from kvstore import BlockExtra, KeyMismatchError, KVCache, KVCacheKey
from kvstore.types import Presence
from tests.faults.store import Store, over
from tests.support_faults import NAMESPACE, SMALL, noise, same, target

N = 3
IMAGE = "5f" * 30
PICTURES = [BlockExtra(1, "a"), BlockExtra(1, "b", offset=1)]


def key(**more: Any) -> KVCacheKey:
    return KVCacheKey.from_tokens(range(16 * N), block_tokens=16, **more)


def extras(*values: bytes | str | int) -> KVCacheKey:
    """Extras of block 0, one after the other."""
    return key(extra=[BlockExtra(0, value, offset=i) for i, value in enumerate(values)])


PAIRS = {
    "adapter-or-salt": (key(adapter="X"), key(salt="X")),
    "adapter-or-none": (key(adapter="X"), key()),
    "salt-or-none": (key(salt="X"), key()),
    "moved-border": (key(salt="org_1", adapter="2345"), key(salt="org_12345", adapter="x")),
    "separator": (key(salt="a|b", adapter="c"), key(salt="a", adapter="b|c")),
    "joined-extras": (extras("a", "b"), extras("ab")),
    "last-4-hex-equal": (extras("0" * 60 + "beef"), extras("1" * 60 + "beef")),
    "first-60-hex-equal": (extras(IMAGE + "beef"), extras(IMAGE + "cafe")),
    "composed": (key(salt=unicodedata.normalize("NFC", "é")), key(salt=unicodedata.normalize("NFD", "é"))),
    "bytes-or-text": (extras(b"1"), extras("1")),
    "text-or-number": (extras("1"), extras(1)),
    "bytes-or-number": (extras(b"1"), extras(1)),
    "salt-bytes-or-text": (key(salt=b"s"), key(salt="s")),
    "adapter-revision": (key(adapter="X@1"), key(adapter="X@2")),
}


def put(cache: Any, made: KVCacheKey, first: int) -> None:
    cache.put(made, noise(SMALL, range(first, first + N)))
    cache.flush(60)


def holds(cache: Any, made: KVCacheKey, first: int) -> bool:
    out = target(SMALL, N)
    return cache.get(made, out) == N and same(out, noise(SMALL, range(first, first + N)))


@over("LNTS")
def test_neither_of_a_pair_reads_the_other_and_each_reads_its_own(store: Store) -> None:
    with store.open() as cache:
        for name, (one, two) in PAIRS.items():
            cache.clear()
            put(cache, one, 0)
            assert holds(cache, one, 0), name  # the same value twice does share
            assert cache.contains_each(two) == [Presence.ABSENT] * N, name  # from block 0 on
            assert cache.get(two, target(SMALL, N)) == 0, name
            put(cache, two, N)
            assert holds(cache, two, N), name
            assert holds(cache, one, 0), name


@over("LNTS")
def test_extras_separate_from_the_first_block_that_they_touch(store: Store) -> None:
    pictured, other = key(extra=PICTURES), noise(SMALL, [0, N + 1, N + 2])
    with store.open(**store.alone()) as cache:  # packs share at their own borders only
        put(cache, key(), 0)
        assert cache.contains_each(pictured) == [Presence.PRESENT] + [Presence.ABSENT] * 2
        cache.store(pictured, other)
        assert holds(cache, key(), 0)
        out = target(SMALL, N)
        assert cache.get(pictured, out) == N
        assert same(out, other)


@over("LNTS")
def test_a_cache_that_requires_a_salt_refuses_keys_without_one(store: Store) -> None:
    config = {**store.config(), "defaults": {"require_salt": True}}
    blocks, out = noise(SMALL, range(N)), target(SMALL, N)
    with KVCache.open(config, spec=SMALL, namespace=NAMESPACE) as cache:
        for call in (lambda: cache.put(key(), blocks), lambda: cache.get(key(), out), lambda: cache.lookup(key())):
            with pytest.raises(KeyMismatchError, match="require_salt"):
                call()
        assert cache.put(key(salt="org_1"), blocks) == N
        cache.flush(10)
        assert cache.get(key(salt="org_1"), out) == N
        assert same(out, blocks)
        assert cache.lookup(key(salt="org_2")).blocks == 0


@over("TS")
def test_packs_that_begin_alike_and_go_on_differently_stay_apart(store: Store) -> None:
    pictured, other = key(extra=PICTURES), noise(SMALL, [0, N + 1, N + 2])
    with store.open() as cache:
        put(cache, key(), 0)
        cache.store(pictured, other)
        assert holds(cache, key(), 0)
        out = target(SMALL, N)
        assert cache.get(pictured, out) == N
        assert same(out, other)


def test_empty_values_are_refused_or_differ_from_none() -> None:
    for made in ({"salt": ""}, {"adapter": ""}):
        try:
            assert key(**made).digests[0] != key().digests[0]
        except ValueError:
            continue
    with pytest.raises((TypeError, ValueError)):
        extras(None)  # type: ignore[arg-type]
    assert extras("a", "", "b") != extras("a", "b")
    assert key(salt="same") == key(salt="same")
