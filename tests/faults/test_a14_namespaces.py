"""A14: a difference in anything that decides what the bytes mean separates; anything else does not."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
import torch

from kvstore import BlockSpec, KVCacheKey, Namespace
from kvstore.record import FORMAT_VERSION, READABLE_VERSIONS
from kvstore.types import Presence
from tests.faults.process import Forge
from tests.faults.store import Store, over
from tests.support_faults import NAMESPACE, SMALL, WatchedCache, noise, same, target

MakeKey = Callable[[int], KVCacheKey]
IDS = [*range(96)]
N = 3


def tokens(block_tokens: int, **more: object) -> KVCacheKey:
    return KVCacheKey.from_tokens(IDS[: N * block_tokens], block_tokens=block_tokens, **more)  # type: ignore[arg-type]


def hashes(block_tokens: int) -> KVCacheKey:
    """A block-hash key that spells the digests of the token key."""
    return KVCacheKey.from_block_hashes(tokens(block_tokens).digests, block_tokens=block_tokens, chained=True)


@dataclasses.dataclass(frozen=True)
class Identity:
    """What one field differs in from the base."""

    spec: BlockSpec = SMALL
    namespace: Namespace = NAMESPACE
    key: MakeKey = tokens


def named(**changed: object) -> Identity:
    return Identity(namespace=dataclasses.replace(NAMESPACE, **changed))  # type: ignore[arg-type]


def shaped(**changed: object) -> Identity:
    return Identity(spec=dataclasses.replace(SMALL, **changed))  # type: ignore[arg-type]


def keyed(**more: object) -> Identity:
    return Identity(key=lambda block_tokens: tokens(block_tokens, **more))


SEPARATING = {
    "model": named(model="other"),
    "revision": named(revision="r2"),
    "revision-absent": named(revision=None),
    "text-config": named(text_config="yarn"),
    "kv-dtype": shaped(dtype="float16"),
    "kv-scales": named(kv_scales="s1"),
    "layout": shaped(layout="NCLD"),
    "heads-split-otherwise": shaped(kv_heads=4, head_dim=32),
    "engine-layout": named(engine_layout="packed"),
    "block-tokens": shaped(block_tokens=32, layers=2),
    "group": keyed(group=1),
    "layers": named(layers=(0, 4)),
    "other-layers": named(layers=(4, 8)),
    "heads": named(kv_heads=(0, 2)),
    "other-heads": named(kv_heads=(2, 4)),
    "lossy-codec": named(lossy_codec=64),
    "adapter": keyed(adapter="a@1"),
    "adapter-revision": keyed(adapter="a@2"),
    "salt": keyed(salt="s"),
    "other-salt": keyed(salt="t"),
    "key-kind": Identity(key=hashes),
    "key-scheme": named(key_scheme=2),
    "engine-version-included": named(engine="e", engine_version="2", include_engine_version=True),
}
DESCRIPTIVE = {
    "rank": named(rank=3),
    "world-size": named(rank=0, world_size=8),
    "host": named(host="elsewhere"),
    "engine": named(engine="e"),
    "engine-version": named(engine="e", engine_version="2"),
}


def opened(store: Store, identity: Identity) -> WatchedCache:
    return store.open(spec=identity.spec, namespace=identity.namespace)


def held(cache: WatchedCache, key: KVCacheKey) -> torch.Tensor:
    out = target(cache.spec, len(key))
    assert cache.get(key, out) == len(key)
    return out


@pytest.fixture
def numbered() -> dict[str, tuple[Identity, torch.Tensor]]:
    """Each identity with blocks of its own for the same tokens; all have the same number of bytes."""
    everyone = {"base": Identity(), **SEPARATING}
    assert {identity.spec.nbytes for identity in everyone.values()} == {SMALL.nbytes}
    return {
        name: (identity, noise(identity.spec, range(N * i, N * i + N)))
        for i, (name, identity) in enumerate(everyone.items())
    }


@over("LNTS")
def test_each_identity_reads_its_own_blocks_and_nobody_elses(
    store: Store, numbered: dict[str, tuple[Identity, torch.Tensor]]
) -> None:
    with contextlib.ExitStack() as stack:
        caches = []
        for identity, blocks in numbered.values():
            key = identity.key(identity.spec.block_tokens)
            cache = stack.enter_context(opened(store, identity))
            assert cache.contains_each(key) == [Presence.ABSENT] * N  # whatever the others stored
            assert cache.get(key, target(identity.spec, N)) == 0
            cache.put(key, blocks)
            cache.flush(60)
            caches.append((cache, key, blocks))
        for cache, key, blocks in caches:
            assert same(held(cache, key), blocks)


@over("LNTS")
def test_two_identities_that_are_open_at_once_stay_apart(store: Store) -> None:
    for name in ("revision", "kv-dtype", "layers", "layout"):
        other = SEPARATING[name]
        with opened(store, Identity()) as one, opened(store, other) as two:
            one.clear()
            two.clear()
            for cache, first in ((one, 0), (two, N)):
                cache.put(tokens(16), noise(cache.spec, range(first, first + N)))
                cache.flush(60)
            assert same(held(one, tokens(16)), noise(SMALL, range(N))), name
            assert same(held(two, tokens(16)), noise(other.spec, range(N, 2 * N))), name
            two.clear()  # a new epoch of the one is none of the other
            assert two.get(tokens(16), target(other.spec, N)) == 0
            assert same(held(one, tokens(16)), noise(SMALL, range(N))), name


ELSEWHERE = """
from tests.faults.test_a14_namespaces import *
one, two = SEPARATING[ARGS[0]], Identity()
with opened(STORE, one) as cache:
    assert cache.get(tokens(16), target(one.spec, N)) == 0
    cache.put(tokens(16), noise(one.spec, range(N, 2 * N)))
    cache.flush(60)
    assert same(held(cache, tokens(16)), noise(one.spec, range(N, 2 * N)))
with opened(STORE, two) as cache:
    assert same(held(cache, tokens(16)), noise(SMALL, range(N)))
print("true")
"""


@over("LNTS")
def test_two_processes_with_two_identities_stay_apart(store: Store, forge: Forge) -> None:
    with opened(store, Identity()) as cache:
        cache.put(tokens(16), noise(SMALL, range(N)))
        cache.flush(60)
        assert forge.work(ELSEWHERE, store, "revision") is True
        assert same(held(cache, tokens(16)), noise(SMALL, range(N)))


@over("LNTS")
def test_what_only_describes_the_writer_does_not_separate(store: Store) -> None:
    with opened(store, Identity()) as cache:
        cache.put(tokens(16), noise(SMALL, range(N)))
        cache.flush(60)
    for name, identity in DESCRIPTIVE.items():
        with opened(store, identity) as cache:
            assert same(held(cache, tokens(16)), noise(SMALL, range(N))), name


@over("LNTS")
def test_an_epoch_separates_at_once_and_over_a_restart(store: Store) -> None:
    with opened(store, Identity()) as cache:
        cache.put(tokens(16), noise(SMALL, range(N)))
        cache.flush(60)
        assert same(held(cache, tokens(16)), noise(SMALL, range(N)))
        cache.clear()
        assert cache.contains_each(tokens(16)) == [Presence.ABSENT] * N
    with opened(store, Identity()) as cache:
        assert cache.get(tokens(16), target(SMALL, N)) == 0
        cache.put(tokens(16), noise(SMALL, range(N, 2 * N)))
        cache.flush(60)
        assert same(held(cache, tokens(16)), noise(SMALL, range(N, 2 * N)))


def test_absent_is_not_empty_and_the_previous_format_is_read() -> None:
    for field in ("revision", "kv_scales", "engine_layout", "text_config"):
        with pytest.raises(ValueError, match="empty"):
            dataclasses.replace(NAMESPACE, **{field: ""})  # type: ignore[arg-type]
    assert FORMAT_VERSION == 1 or FORMAT_VERSION - 1 in READABLE_VERSIONS
