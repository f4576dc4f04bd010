"""Records that only holders of a key can read, or make, over every medium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, KVCache
from kvstore.errors import ConfigError
from kvstore.l2.counters import TierCounters
from tests.faults.store import TIER, Store, over
from tests.support_faults import NAMESPACE, SMALL, WatchedCache, chain, gauss, noise, same, target, unrelated
from tests.support_sealing import NAME, sealing_registry

CUT = BlockSpec(layers=8, kv_heads=8, head_dim=128, block_tokens=64, dtype="bfloat16")  # 2 MiB in 8 segments
OPEN = {"codecs": {NAME: {"phrase": "open sesame"}}}
OVER_PLANES = {"codecs": {NAME: {"phrase": "open sesame", "inner": "planes"}}}
WINDOW_BYTES = 16
NEW_KEY, OLD_KEY, FOREIGN_KEY = ("1" * 64, "2" * 64, "3" * 64)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in (("NEW", NEW_KEY), ("OLD", OLD_KEY), ("FOREIGN", FOREIGN_KEY)):
        monkeypatch.setenv(name, key)


def keyed(*sources: str, **sections: Any) -> dict[str, Any]:
    return {"defaults": {"record_keys": list(sources)}, **sections}


def counters(cache: WatchedCache) -> TierCounters:
    return next(tier.counters for tier in cache.cache.stats().tiers if tier.name == TIER)


def open_sealed(store: Store, sections: dict[str, Any], **more: Any) -> WatchedCache:
    return store.open(**{"codec": NAME, "sections": sections, "registry": sealing_registry(), **more})


def streamed(cache: WatchedCache, n_blocks: int, spec: BlockSpec) -> torch.Tensor:
    """All layers of a chain, group by group; also says that there were several groups."""
    groups = list(cache.cache.stream(chain(n_blocks, spec=spec)))
    assert len(groups) > 1
    assert groups[-1].n_blocks == n_blocks
    return torch.cat([group.tensor[:n_blocks] for group in groups], dim=1)


@over("LNTS")
def test_sealed_blocks_come_back_and_nothing_of_them_lies_in_the_store(store: Store) -> None:
    blocks = noise(SMALL, range(5))
    with open_sealed(store, OPEN) as cache:
        assert cache.put(chain(5), blocks) == 5
        cache.flush(60)
        assert counters(cache).stored == 5
    with open_sealed(store, OPEN) as cache:
        out = target(SMALL, 5)
        assert cache.get(chain(5), out) == 5
        assert same(out, blocks)
    raw = bytes(blocks.view(torch.uint8).flatten().numpy().data)
    stored = b"".join(store.read(place) for place in store.places())
    assert len(stored) > len(raw)
    windows = [raw[at : at + WINDOW_BYTES] for at in range(0, len(raw) - WINDOW_BYTES, 4099)]
    assert not any(window in stored for window in windows)
    with store.open() as cache:  # and a plain record is found by the same search
        cache.store(unrelated(7), blocks[:1])
        assert any(window in store.read(store.at(unrelated(7))) for window in windows)


@over("LNTS")
@pytest.mark.parametrize("sections", [OPEN, OVER_PLANES, keyed("2=env:NEW", **OVER_PLANES)])
def test_layers_of_sealed_and_keyed_records_come_one_by_one(store: Store, keys: None, sections: dict[str, Any]) -> None:
    blocks = gauss(CUT, range(3))
    with open_sealed(store, sections, spec=CUT) as cache:
        cache.put(chain(3, spec=CUT), blocks)
        cache.flush(60)
    with open_sealed(store, sections, spec=CUT) as cache:
        assert same(streamed(cache, 3, CUT), blocks)
        out = target(CUT, 3)
        assert cache.get(chain(3, spec=CUT), out) == 3
        assert same(out, blocks)


@over("LNTS")
def test_who_cannot_open_what_is_sealed_has_misses(store: Store) -> None:
    def left() -> int:
        with open_sealed(store, OPEN) as cache:
            out = target(SMALL)
            found = cache.get(unrelated(0), out)
            assert same(out, noise(SMALL, [0])) if found else True
            return int(found)

    others: list[dict[str, Any]] = [
        {"sections": {"codecs": {NAME: {"phrase": "guess"}}}},
        {"codec": "none", "sections": {}},  # the codec is there, its phrase is not
        {"codec": "none", "registry": None, "sections": {}, "as_stored": True},  # not even the codec
    ]
    for other in others:
        with open_sealed(store, OPEN) as cache:
            cache.store(unrelated(0), noise(SMALL, [0]))
        assert left() == 1
        if other.pop("as_stored", False):
            other.pop("registry")
            cache = store.open(codec="none")
        else:
            cache = open_sealed(store, **other)
        with cache:
            assert cache.fetch(unrelated(0)) is None
            assert counters(cache).corrupt >= 1
        assert left() == 0, "what fails verification is dropped"


@over("LNTS")
def test_only_records_made_with_a_key_of_the_ring_are_believed(store: Store, keys: None) -> None:
    made_with: dict[int, tuple[str, ...]] = {
        0: (),
        1: ("3=env:FOREIGN",),
        2: ("1=env:OLD",),
        3: ("2=env:NEW", "env:OLD"),
    }
    for i, sources in made_with.items():
        with store.open(sections=keyed(*sources)) as cache:
            cache.store(unrelated(i), noise(SMALL, [i]))
            assert cache.fetch(unrelated(i)) is not None
    with store.open(sections=keyed("2=env:NEW", "1=env:OLD")) as cache:
        for i in (2, 3):
            found = cache.fetch(unrelated(i))
            assert found is not None
            assert same(found, noise(SMALL, [i]))
        assert counters(cache).unauthenticated == 0
        for i in (0, 1):
            assert cache.fetch(unrelated(i)) is None
        assert counters(cache).unauthenticated >= 2
        assert counters(cache).corrupt == 0
        for i in (0, 1):  # and there is room for good ones
            cache.store(unrelated(i), noise(SMALL, [i]))
            assert cache.fetch(unrelated(i)) is not None
    with store.open() as cache:
        assert cache.fetch(unrelated(3)) is None, "without a key a keyed record is a miss"
        assert counters(cache).corrupt >= 1
    with store.open(sections=keyed("1=env:OLD")) as cache:
        assert cache.fetch(unrelated(0)) is None, "the old key alone does not read what the new one made"
        assert cache.fetch(unrelated(2)) is not None


@over("LNTS")
def test_layers_of_a_record_made_without_the_key_are_not_streamed(store: Store, keys: None) -> None:
    blocks, key = noise(CUT, range(2)), chain(2, spec=CUT)
    with store.open(spec=CUT) as cache:
        cache.put(key, blocks)
        cache.flush(60)
        assert same(streamed(cache, 2, CUT), blocks)
    with store.open(spec=CUT, sections=keyed("env:NEW")) as cache:
        assert sum(group.n_blocks for group in cache.cache.stream(key)) == 0
        assert counters(cache).unauthenticated >= 1
        cache.put(key, blocks)
        cache.flush(60)
        assert same(streamed(cache, 2, CUT), blocks)


@over("N")
def test_a_region_of_one_block_has_room_for_a_sealed_one(store: Store) -> None:
    spec = BlockSpec.opaque(4 << 20, block_tokens=16, tag="rows")
    blocks = noise(spec, range(2))
    with open_sealed(store, OPEN, spec=spec, capacity="16MiB") as cache:
        for i in range(2):
            cache.store(unrelated(i, spec), blocks[i : i + 1])
        found = cache.fetch(unrelated(1, spec))
        assert found is not None
        assert same(found, blocks[1:])
        assert counters(cache).refused_medium == 0


def test_a_codec_that_a_tier_names_is_tried_when_the_cache_is_opened(tmp_path: Path) -> None:
    config = {"l2": [{"backend": "lmdb", "path": str(tmp_path / "store"), "codec": NAME, "required": False}]}
    with pytest.raises(ConfigError, match=r"codecs\.xor-seal\.phrase is not set"):
        KVCache.open(config, spec=SMALL, namespace=NAMESPACE, registry=sealing_registry())
    odd = BlockSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=13, dtype="bfloat16")  # it does not support this one
    with pytest.raises(ConfigError, match="cannot seal"):
        KVCache.open({**config, **OPEN}, spec=odd, namespace=NAMESPACE, registry=sealing_registry())
    KVCache.open({**config, **OPEN}, spec=SMALL, namespace=NAMESPACE, registry=sealing_registry()).close()


def test_a_key_that_cannot_be_had_is_found_out_when_the_cache_is_opened(tmp_path: Path) -> None:
    config = {"l2": [{"backend": "lmdb", "path": str(tmp_path / "store")}], **keyed("env:NO_SUCH_KEY")}
    with pytest.raises(ConfigError, match=r"defaults\.record_keys: no key from 'env:NO_SUCH_KEY'"):
        KVCache.open(config, spec=SMALL, namespace=NAMESPACE)
