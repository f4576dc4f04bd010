"""AIBrix's variables become a kvstore config, or are named as without effect."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore import ConfigError, Namespace
from kvstore.compat import aibrix
from kvstore.compat.aibrix import settings
from kvstore.compat.aibrix.environment import PREFIX, block_tokens_override, read_environment
from kvstore.config import load_config
from tests.unit.compat.rig import config_of, ids_of, store

GIB = 1 << 30


def storage_of(**variables: str) -> dict[str, Any]:
    return dict(
        read_environment({PREFIX + name: value for name, value in variables.items()}, with_storage=True).storage
    )


def test_nothing_set_is_ten_gib_of_memory() -> None:
    storage = storage_of()
    assert storage == {"l1": {"enabled": True, "capacity": 10 * GIB, "device": "cpu"}}
    assert load_config(storage).l1.policy == "prefix-lru"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"L1_CACHE_CAPACITY_GB": "0.5"}, {"capacity": GIB // 2}),
        ({"L1_CACHE_EVICTION_POLICY": "s3fifo"}, {"policy": "s3fifo"}),
        ({"L1_CACHE_EVICTION_POLICY": " LRU "}, {"policy": "lru"}),
        ({"DEVICE": "cpu:0"}, {"device": "cpu"}),
        ({"DEVICE": "cuda:1"}, {"device": "cuda:1"}),
    ],
)
def test_l1_variables_are_l1_settings(variables: dict[str, str], expected: dict[str, Any]) -> None:
    assert storage_of(**variables)["l1"].items() >= expected.items()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"L2_CACHE_BACKEND": "rocksdb", "ROCKSDB_ROOT": "/r"},
            {"backend": "lmdb", "path": "/r/kvstore", "admit": "hot", "codec": "auto"},
        ),
        (
            {"L2_CACHE_BACKEND": "SHFS", "SHFS_ROOT": "/s", "L2_CACHE_INGESTION_TYPE": "ALL"},
            {"backend": "nvme", "layout": "tree", "pack": 1, "path": "/s/kvstore", "admit": "all"},
        ),
        (
            {"L2_CACHE_BACKEND": "MOCK", "L2_CACHE_INGESTION_TYPE": "EVICTED", "L2_CACHE_COMPRESSION": "zstd"},
            {"backend": "memory", "admit": "evicted", "codec": "planes"},
        ),
        (
            {"L2_CACHE_BACKEND": "ROCKSDB", "L1_CACHE_ENABLED": "0", "L2_CACHE_INGESTION_TYPE": "EVICTED"},
            {"backend": "lmdb", "path": "~/.kv_cache_ol/rocksdb/kvstore", "admit": "all"},
        ),
    ],
)
def test_l2_variables_are_a_tier(variables: dict[str, str], expected: dict[str, Any]) -> None:
    storage = storage_of(**variables)
    assert storage["l2"][0].items() >= expected.items()
    load_config(storage)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("L2_CACHE_BACKEND", "INFINISTORE", "KVSTORE_CONFIG"),
        ("L1_CACHE_CAPACITY_GB", "many", "GiB above 0"),
        ("L1_CACHE_CAPACITY_GB", "0", "GiB above 0"),
        ("L1_CACHE_EVICTION_POLICY", "ARC", "LRU or FIFO or S3FIFO"),
        ("L2_CACHE_INGESTION_TYPE", "SOME", "ALL or HOT or EVICTED"),
        ("L2_CACHE_COMPRESSION", "GZIP", "nothing or ZSTD"),
        ("CHUNK_SIZE", "big", "an integer"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        storage_of(**{"L2_CACHE_BACKEND": "MOCK"} | {name: value})
    assert PREFIX + name in str(error.value)
    assert value in str(error.value)


def test_the_block_size_is_a_power_of_two() -> None:
    assert block_tokens_override({PREFIX + "BLOCK_SIZE": "32"}) == 32
    assert block_tokens_override({PREFIX + "BLOCK_SIZE": "-1"}) is None
    with pytest.raises(ConfigError, match="power of two"):
        block_tokens_override({PREFIX + "BLOCK_SIZE": "24"})


def test_variables_without_effect_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settings, "_process", settings._Process())
    monkeypatch.setenv(PREFIX + "META_SERVICE_BACKEND", "REDIS")
    monkeypatch.setenv(PREFIX + "NO_SUCH_THING", "1")
    monkeypatch.setenv(PREFIX + "L1_CACHE_CAPACITY_GB", "0.001")
    with caplog.at_level(logging.WARNING, logger=settings.__name__):
        for _ in range(2):
            aibrix.BaseKVCacheManager(config_of()).close()
    told = [record.getMessage() for record in caplog.records if record.name == settings.__name__]
    assert len(told) == 2
    assert f"{PREFIX}META_SERVICE_BACKEND, {PREFIX}NO_SUCH_THING" in told[0]
    assert "L1_CACHE_CAPACITY_GB" not in told[0]
    assert "configure(namespace=" in told[1]


def test_a_config_stands_in_for_the_storage_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PREFIX + "L1_CACHE_CAPACITY_GB", "0.25")
    monkeypatch.setenv(PREFIX + "L2_CACHE_BACKEND", "INFINISTORE")
    file = tmp_path / "kvstore.toml"
    file.write_text('[l1]\ncapacity = "1MiB"\n')
    monkeypatch.setenv("KVSTORE_CONFIG", str(file))
    cache = aibrix.BaseKVCacheManager(config_of())
    assert cache._store.config.l1.capacity == 1 << 20
    cache.close()
    aibrix.configure({"l1": {"capacity": "2MiB"}})
    cache = aibrix.BaseKVCacheManager(config_of())
    assert cache._store.config.l1.capacity == 2 << 20
    cache.close()
    unused = read_environment({PREFIX + "L1_CACHE_CAPACITY_GB": "1"}, with_storage=False).unused
    assert unused == (PREFIX + "L1_CACHE_CAPACITY_GB",)


def test_tokens_in_flight_bound_the_write_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"L2_CACHE_BACKEND": "MOCK", "L1_CACHE_CAPACITY_GB": "0.001"}.items():
        monkeypatch.setenv(PREFIX + name, value)
    monkeypatch.setenv(PREFIX + "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS", "4096")
    cache = aibrix.BaseKVCacheManager(config_of())
    assert cache._store.config.l2[0].queue == 1024 * cache.block_nbytes
    cache.close()
    monkeypatch.setenv(PREFIX + "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS", "8")  # below two chunks
    cache = aibrix.BaseKVCacheManager(config_of())
    assert cache._store.config.l2[0].queue == 256 * cache.block_nbytes
    cache.close()


@pytest.mark.parametrize(("variable", "expected"), [("64", 64), ("30", 28), ("4", 16), (None, 512)])
def test_a_chunk_is_whole_blocks_and_at_least_four(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int
) -> None:
    if variable:
        monkeypatch.setenv(PREFIX + "CHUNK_SIZE", variable)
    aibrix.configure({"l1": {"capacity": "1MiB"}})
    cache = aibrix.BaseKVCacheManager(config_of())
    assert cache.chunk_size == expected
    cache.close()


def namespace_of(namespace: Namespace | None, **spec: Any) -> Namespace:
    aibrix.configure({"l1": {"capacity": "1MiB"}}, namespace=namespace)
    cache = aibrix.BaseKVCacheManager(config_of(**spec))
    cache.close()
    return cache._store.namespace


def test_blocks_are_named_by_the_model_and_the_part_of_it_that_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Namespace(model="m", revision="r", kv_scales="s")
    assert namespace_of(given, heads=[2, 3], layers=range(4, 7)) == Namespace(
        model="m", revision="r", kv_scales="s", kv_heads=(2, 4), layers=(4, 7)
    )
    odd = namespace_of(given, heads=[0, 2])
    assert odd.kv_heads is None
    assert odd.engine_layout is not None
    assert odd != namespace_of(given, heads=[0, 3])
    assert namespace_of(None).model == "aibrix/aibrix"
    monkeypatch.setenv(PREFIX + "L2_CACHE_NAMESPACE", "Prod")
    assert namespace_of(None).model == "aibrix/prod"
    assert namespace_of(given).engine_layout == "namespace-prod"


def test_hashes_of_content_need_their_prefix() -> None:
    aibrix.configure({"l1": {"capacity": "1MiB"}}, block_hashes="content")
    cache = aibrix.BaseKVCacheManager(config_of())
    a, b = aibrix.BlockHashes(["p", "x", "x"], 4), aibrix.BlockHashes(["q", "x"], 4)
    store(cache, None, a)
    assert cache.exists(a[:4], a[4:]).value == 8
    assert cache.exists(None, a[4:]).is_not_found()
    assert cache.exists(b[:4], b[4:]).is_not_found()
    cache.close()
    with pytest.raises(ValueError, match="'chained' or 'content'"):
        aibrix.configure(block_hashes="neither")  # type: ignore[arg-type]


def test_a_hash_that_repeats_is_invalid_where_hashes_stand_alone() -> None:
    aibrix.configure({"l1": {"capacity": "1MiB"}})
    cache = aibrix.BaseKVCacheManager(config_of())
    repeated = aibrix.BlockHashes(["x", "x"], 4)
    assert cache.exists(None, repeated).is_invalid()
    assert cache.allocate_for(None, repeated).is_invalid()
    assert cache.exists(None, ids_of("tokens", 1)).is_not_found()
    cache.close()
