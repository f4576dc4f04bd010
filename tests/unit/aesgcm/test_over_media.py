"""Encrypted blocks through a whole cache, on every medium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.backend import PutItem
from kvstore.cli.main import main
from kvstore.errors import ConfigError
from kvstore.types import Call, PutStatus
from tests.faults.media import MEDIA
from tests.faults.store import TIER, Store
from tests.support_faults import NAMESPACE, SMALL, WatchedCache, chain, gauss, noise, same, target, unrelated
from tests.support_s3 import CREDENTIALS, make_bucket
from tests.support_s3 import moto_url as moto_url  # noqa: PLC0414 - a fixture
from tests.unit.aesgcm.sealing import KEY_1, KEY_2, keys
from tests.unit.record.conftest import Layout

TWO_SEGMENTS = BlockSpec(layers=8, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
FP8 = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="float8_e4m3fn")
OLD, NEW = (1, KEY_1), (2, KEY_2)
PLANTED = range(100, 110)  # numbers of blocks that tests change behind the cache's back


@pytest.fixture(params=list(MEDIA))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = MEDIA[request.param].make(tmp_path / request.param)
    yield made
    made.close()


def encrypted(store: Store, *pairs: tuple[int, str], inner: str = "planes", **more: Any) -> WatchedCache:
    """A cache whose tier encrypts with the first of these keys, without L1."""
    sections = {"codecs": {"aes-gcm": {"keys": list(keys(*(pairs or (OLD,)))), "inner": inner}}}
    return store.open(codec="aes-gcm", sections=sections, **more)


def stored_bytes(store: Store) -> bytes:
    """Everything that lies on the medium."""
    if store.kind == "s3":
        return b"".join(store.server.buckets["faults"][key].body for key in store.server.buckets["faults"])  # type: ignore[attr-defined]
    return b"".join(path.read_bytes() for path in sorted(store.root.rglob("*")) if path.is_file())


@pytest.mark.parametrize("inner", ["planes", "none"])
def test_blocks_come_back_bit_for_bit_also_after_a_restart(store: Store, inner: str) -> None:
    blocks = torch.cat([gauss(SMALL, range(3)), noise(SMALL, range(3))])
    for turn in range(2):
        with encrypted(store, inner=inner) as cache:
            if not turn:
                cache.put(chain(6), blocks)
                cache.flush(60)
            out = target(SMALL, 6)
            assert cache.get(chain(6), out) == 6
            assert same(out, blocks)
            assert [status.value for status in cache.get_each(chain(6), target(SMALL, 6))] == ["delivered"] * 6
            counters = cache.tier(TIER).counters
            assert counters.corrupt == counters.unauthenticated == 0


@pytest.mark.parametrize("inner", ["planes", "none"])
def test_layers_come_back_one_by_one(store: Store, inner: str) -> None:
    blocks, key = gauss(TWO_SEGMENTS, range(3)), chain(3, spec=TWO_SEGMENTS)
    with encrypted(store, inner=inner, spec=TWO_SEGMENTS) as cache:
        cache.put(key, blocks)
        cache.flush(60)
    with encrypted(store, inner=inner, spec=TWO_SEGMENTS) as cache:
        groups = list(cache.stream(key))
        assert sum(group.n_layers for group in groups) == TWO_SEGMENTS.layers
        assert groups[-1].n_blocks == 3
        assert same(torch.cat([group.tensor for group in groups], dim=1), blocks)


def test_blocks_come_back_from_a_bucket_of_another_server(moto_url: str) -> None:
    make_bucket(moto_url, "encrypted")
    tier = {"backend": "s3", "name": TIER, "bucket": "encrypted", "endpoint_url": moto_url, **CREDENTIALS}
    tier |= {"codec": "aes-gcm", "admit": "all"}
    config = {"l1": {"enabled": False}, "codecs": {"aes-gcm": {"keys": list(keys(OLD))}}, "l2": [tier]}
    blocks = torch.cat([gauss(SMALL, range(3)), noise(SMALL, range(3))])
    for turn in range(2):
        with WatchedCache(KVCache.open(config, spec=SMALL, namespace=NAMESPACE), 30) as cache:
            if not turn:
                cache.put(chain(6), blocks)
                cache.flush(60)
            out = target(SMALL, 6)
            assert cache.get(chain(6), out) == 6
            assert same(out, blocks)


def test_blocks_that_the_inner_codec_does_not_support_come_back(store: Store) -> None:
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 6, (2, FP8.nbytes), dtype=np.uint8))
    blocks = raw.view(FP8.torch_dtype()).view(2, *FP8.shape)
    with encrypted(store, spec=FP8) as cache:
        cache.put(chain(2, spec=FP8), blocks)
        cache.flush(60)
        out = target(FP8, 2)
        assert cache.get(chain(2, spec=FP8), out) == 2
        assert same(out, blocks)


def test_after_a_rotation_old_blocks_are_read_and_new_ones_have_the_new_key(store: Store) -> None:
    first, second = unrelated(1), unrelated(2)
    with encrypted(store, OLD) as cache:
        cache.store(first, gauss(SMALL, [1]))
    with encrypted(store, NEW, OLD) as cache:
        found = cache.fetch(first)
        assert found is not None
        assert same(found, gauss(SMALL, [1]))
        cache.store(second, gauss(SMALL, [2]))
    with encrypted(store, NEW) as cache:
        assert cache.fetch(first) is None
        assert cache.tier(TIER).counters.corrupt == 1
        found = cache.fetch(second)
        assert found is not None
        assert same(found, gauss(SMALL, [2]))


# -- what lies on the medium


@pytest.mark.parametrize(("codec", "inner", "found"), [
    ("none", "", True),
    ("planes", "", True),
    ("aes-gcm", "none", False),
    ("aes-gcm", "planes", False),
])  # fmt: skip
def test_nothing_of_a_block_can_be_read_on_the_medium(store: Store, codec: str, inner: str, found: bool) -> None:
    """With each codec alone the same search does find the block: all of it, or its bytes that planes leave alone."""
    marker = bytes(range(64, 128))
    words = gauss(SMALL, [0]).view(torch.uint8).flatten().clone()
    words[4096 : 4096 + len(marker)] = torch.frombuffer(bytearray(marker), dtype=torch.uint8)
    block = words.view(torch.bfloat16).view(1, *SMALL.shape)
    sections = {"codecs": {"aes-gcm": {"keys": list(keys(OLD)), "inner": inner}}} if inner else {}
    tokens = [7_000_000 + i for i in range(SMALL.block_tokens)]
    with store.open(codec=codec, sections=sections) as cache:
        cache.store(KVCacheKey.from_tokens(tokens, block_tokens=SMALL.block_tokens), block)
    lying = stored_bytes(store)
    assert len(lying) > 0.6 * SMALL.nbytes
    low_bytes = marker[::2]  # what the planes codec stores as it is; at least 16 bytes
    assert any(part in lying for part in (marker[:16], low_bytes[:16])) == found
    assert (np.array(tokens, "<u4").tobytes()[:16] in lying) <= found


def test_a_tier_that_encrypts_gets_no_plain_record_from_its_neighbours(store: Store, tmp_path: Path) -> None:
    """A block that comes from a tier without encryption is encrypted on its way."""
    plain = MEDIA["lmdb"].make(tmp_path / "plain")
    below = {"name": "plain", "capacity": "64MiB", "codec": "none", **plain.section()}
    block = noise(SMALL, [5])
    with plain.open() as cache:
        cache.store(unrelated(5), block)
    with encrypted(store, below=[below], inner="none") as cache:
        found = cache.fetch(unrelated(5))  # from below, and promoted
        assert found is not None
        assert same(found, block)
        cache.flush(60)
    marker = block.view(torch.uint8).flatten().numpy().tobytes()[1000:1016]
    assert marker in stored_bytes(plain)
    assert marker not in stored_bytes(store)
    with encrypted(store) as cache:
        found = cache.fetch(unrelated(5))
        assert found is not None, "it was not promoted"
        assert same(found, block)
    plain.close()


# -- somebody who may write to the medium


def record_of(cache: WatchedCache, key: KVCacheKey) -> bytes:
    """The stored record of a block."""
    found: list[bytes] = []
    tier = cache._state.stack.tiers[0].tier
    names = tier.names(key.kind, key.digests)
    tier.backend.get_many(names, lambda _, view: found.append(bytes(view)), Call.within(5))
    return found[0]


def plant(store: Store, records: dict[KVCacheKey, bytes]) -> None:
    """Put records where a cache looks for them, as any program with the backend's library can."""
    with encrypted(store) as cache:
        tier = cache._state.stack.tiers[0].tier
        for key, record in records.items():
            (name,) = tier.names(key.kind, key.digests)
            tier.backend.delete_many([name], Call.within(5))
            head = 192 + 16 * int(Layout.read(record, "n_segments"))
            item = PutItem(name, [memoryview(record)[:head], memoryview(record)[head:]])
            assert tier.backend.put_many([item], Call.within(5)) == [PutStatus.STORED]


def test_a_changed_segment_is_a_miss_although_every_checksum_is_right(store: Store) -> None:
    sound, records, expected = unrelated(PLANTED[0]), {}, gauss(SMALL, [0])
    with encrypted(store) as cache:
        for i, at in enumerate((None, 0, 4, 6, 10, 25, 3000, -1)):  # in every region of a segment
            key = unrelated(PLANTED[i])
            cache.store(key, expected)
            (payload,) = Layout.payloads(record_of(cache, key))
            bad = bytearray(payload)
            if at is not None:
                bad[at] ^= 1
            records[key] = Layout.forge(record_of(cache, key), [bytes(bad)])
    plant(store, records)
    with encrypted(store) as cache:
        for key in records:
            found = cache.fetch(key)
            assert (found is not None) == (key == sound)
            assert found is None or same(found, expected)
        counters = cache.tier(TIER).counters
        assert counters.unauthenticated + counters.corrupt == len(records) - 1
        assert counters.unauthenticated >= 4


def test_a_record_moved_to_another_block_is_a_miss(store: Store) -> None:
    victim, other = unrelated(1), unrelated(2)
    with encrypted(store) as cache:
        cache.store(other, gauss(SMALL, [2]))
        record = record_of(cache, other)
    plant(store, {victim: Layout.seal(Layout.patch(record, "digest", victim[0])), other: record})
    with encrypted(store) as cache:
        assert cache.fetch(victim) is None
        assert cache.tier(TIER).counters.unauthenticated == 1
        assert cache.fetch(other) is not None


def test_a_record_moved_to_another_namespace_is_a_miss(store: Store) -> None:
    theirs = Namespace(model="faults", revision="r2")
    key = unrelated(1)
    with encrypted(store, namespace=theirs) as cache:
        cache.store(key, gauss(SMALL, [1]))
        record = record_of(cache, key)
    plant(store, {key: Layout.seal(Layout.patch(record, "namespace", NAMESPACE.digest(SMALL)))})
    with encrypted(store) as cache:
        assert cache.fetch(key) is None
        assert cache.tier(TIER).counters.unauthenticated == 1
    with encrypted(store, namespace=theirs) as cache:
        assert cache.fetch(key) is not None


def test_a_cache_without_the_keys_misses_and_lives(store: Store) -> None:
    with encrypted(store) as cache:
        cache.store(unrelated(1), gauss(SMALL, [1]))
    with store.open(codec="planes") as cache:
        assert cache.fetch(unrelated(1)) is None
        assert cache.tier(TIER).counters.corrupt == 1
        cache.store(unrelated(1), gauss(SMALL, [1]))
        assert cache.fetch(unrelated(1)) is not None


def test_tools_look_into_an_encrypted_store_without_its_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with encrypted(MEDIA["lmdb"].make(tmp_path / "store")) as cache:
        cache.put(chain(3), gauss(SMALL, range(3)))
        cache.flush(60)
    for command in ("stat", "ls", "verify"):
        assert main([command, str(tmp_path / "store"), "--json"]) == 0
        told = capsys.readouterr().out
        assert all(json.loads(line) for line in told.splitlines())
        assert command == "verify" or "aes-gcm" in told


# -- opening


@pytest.mark.parametrize("codecs", [{}, {"aes-gcm": {}}, {"aes-gcm": {"keys": []}}])
def test_a_tier_that_is_to_encrypt_does_not_open_without_a_key(codecs: dict[str, Any], tmp_path: Path) -> None:
    config = {"codecs": codecs, "l2": [{"backend": "lmdb", "path": str(tmp_path / "store"), "codec": "aes-gcm"}]}
    with pytest.raises(ConfigError, match=r"codecs\.aes-gcm\.keys"):
        KVCache.open(config, spec=SMALL, namespace=NAMESPACE)


def test_an_inner_codec_that_encrypts_is_refused_at_open(tmp_path: Path) -> None:
    section = {"keys": list(keys(OLD)), "inner": "aes-gcm"}
    tier = {"backend": "lmdb", "path": str(tmp_path / "store"), "codec": "aes-gcm"}
    with pytest.raises(ConfigError, match=r"codecs\.aes-gcm\.inner"):
        KVCache.open({"codecs": {"aes-gcm": section}, "l2": [tier]}, spec=SMALL, namespace=NAMESPACE)


def test_the_memory_backend_keeps_encrypted_records_as_well() -> None:
    tier = {"backend": "memory", "capacity": "4MiB", "codec": "aes-gcm", "name": TIER}
    config = {"l1": {"enabled": False}, "codecs": {"aes-gcm": {"keys": list(keys(OLD))}}, "l2": [tier]}
    with WatchedCache(KVCache.open(config, spec=SMALL, namespace=NAMESPACE), 10) as cache:
        for i, make in enumerate((gauss, noise)):
            cache.store(unrelated(i), make(SMALL, [i]))
            found = cache.fetch(unrelated(i))
            assert found is not None
            assert same(found, make(SMALL, [i]))
            assert noise(SMALL, [i]).view(torch.uint8).numpy().tobytes()[:16] not in record_of(cache, unrelated(i))
