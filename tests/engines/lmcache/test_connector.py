"""The remote connector under LMCache's own storage manager and remote backend."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="LMCache is not installed (make test-engines)")

from kvstore_lmcache.connector import KVStoreConnectorAdapter
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.connector import ConnectorContext

from tests.engines.lmcache.engine import CHUNK_TOKENS, HEAD_DIM, HEADS, LAYERS, content, lmdb

pytestmark = pytest.mark.engine

WHOLE_BYTES = 2 * LAYERS * CHUNK_TOKENS * HEADS * HEAD_DIM * 2
PARTIAL = (("save_unfull_chunk", True),)


def bytes_of(seed: int, tokens: int = CHUNK_TOKENS) -> bytes:
    return content(WHOLE_BYTES * tokens // CHUNK_TOKENS, seed).numpy().tobytes()


def test_chunks_come_back_bit_for_bit_and_no_memory_is_lost(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"))
    free = engine.free_bytes()
    keys = engine.keys(1, 2, 3)

    engine.put(keys[:2], [engine.chunk(1), engine.chunk(2)])

    assert engine.get(keys) == [bytes_of(1), bytes_of(2), None]
    assert engine.backend.batched_contains(keys) == 2
    assert engine.backend.contains(keys[1])
    assert not engine.backend.contains(keys[2])
    assert engine.free_bytes() == free


def test_every_way_to_ask_gives_the_same_answer(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"))
    keys = engine.keys(1, 2, 3)
    engine.put([keys[0]], [engine.chunk(1)])
    engine.put([keys[2]], [engine.chunk(3)])
    free = engine.free_bytes()
    loop, backend, connector = engine.manager.loop, engine.backend, engine.connector

    def on_loop(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    assert on_loop(backend.batched_async_contains("lookup", keys)) == 1
    assert [connector.exists_sync(key) for key in keys] == [True, False, True]
    assert [on_loop(connector.exists(key)) for key in keys] == [True, False, True]
    prefix = on_loop(backend.batched_get_non_blocking("lookup", keys))
    assert [bytes(memory.byte_array) for memory in prefix] == [bytes_of(1)]
    single = backend.get_blocking(keys[2])
    assert bytes(single.byte_array) == bytes_of(3)
    for memory in [*prefix, single]:
        memory.ref_count_down()
    assert engine.free_bytes() == free
    assert on_loop(connector.ping()) == 0
    with pytest.raises(NotImplementedError, match="digests"):
        on_loop(connector.list())


def test_removed_chunks_are_gone(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"))
    (key,) = engine.keys(1)
    engine.put([key], [engine.chunk(1)])

    assert engine.backend.remove(key)
    assert not engine.backend.remove(key)
    assert engine.get([key]) == [None]


def test_a_short_last_chunk_keeps_its_shape(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"), lmcache=PARTIAL)
    keys = engine.keys(1, 2)
    engine.put(keys, [engine.chunk(1), engine.chunk(2, tokens=5)])

    assert engine.backend.batched_contains(keys) == 2
    whole, short = engine.backend.batched_get_blocking(keys)

    assert (whole.get_num_tokens(), short.get_num_tokens()) == (CHUNK_TOKENS, 5)
    assert (short.get_dtype(), short.get_memory_format()) == (torch.bfloat16, MemoryFormat.KV_2LTD)
    assert bytes(short.byte_array) == bytes_of(2, tokens=5)
    for memory in (whole, short):
        memory.ref_count_down()


def test_a_short_chunk_is_refused_and_counted_when_lmcache_saves_none(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"))
    (key,) = engine.keys(1)

    engine.put([key], [engine.chunk(1, tokens=5)])

    assert engine.get([key]) == [None]
    assert engine.connector.counters.unfit == 1


@pytest.mark.parametrize(
    ("fields", "shape", "fmt"),
    [
        ({}, (CHUNK_TOKENS, 2, HEADS * HEAD_DIM), MemoryFormat.KV_T2D),
        ({"use_mla": True, "kv_shape": (LAYERS, 1, CHUNK_TOKENS, 1, 24)}, (CHUNK_TOKENS, 24), MemoryFormat.KV_MLA_FMT),
    ],
)
def test_layers_are_chunks_of_their_own(
    start: Any, tmp_path: Path, fields: dict[str, Any], shape: tuple[int, ...], fmt: MemoryFormat
) -> None:
    engine = start(config=lmdb(tmp_path / "store"), lmcache=(("use_layerwise", True),), metadata=tuple(fields.items()))
    layers = engine.keys(7)[0].split_layers(LAYERS)
    memory_objs = []
    for layer in range(LAYERS):
        memory = engine.manager.allocate(torch.Size(shape), torch.bfloat16, fmt, busy_loop=False)
        memory.raw_tensor[: memory.get_size()].copy_(content(memory.get_size(), layer))
        memory_objs.append(memory)
    nbytes = memory_objs[0].get_size()

    engine.put(layers, memory_objs)

    assert engine.get(layers) == [content(nbytes, layer).numpy().tobytes() for layer in range(LAYERS)]
    assert engine.connector.counters.unfit == 0
    assert isinstance(layers[0], LayerCacheEngineKey)
    assert engine.get(engine.keys(7)) == [None]


def test_an_mla_chunk_has_one_latent_per_token(start: Any, tmp_path: Path) -> None:
    fields = (("use_mla", True), ("kv_shape", (LAYERS, 1, CHUNK_TOKENS, 1, 24)))
    engine = start(config=lmdb(tmp_path / "store"), metadata=fields)
    (key,) = engine.keys(1)
    memory = engine.manager.allocate(engine.metadata.get_shapes(), [torch.bfloat16], MemoryFormat.KV_MLA_FMT)
    memory.raw_tensor[: memory.get_size()].copy_(content(memory.get_size(), 1))
    expected = bytes(memory.byte_array)

    engine.put([key], [memory])

    assert engine.get([key]) == [expected]


def test_tags_ranks_and_models_are_other_chunks(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"))
    (plain,) = engine.keys(1)
    others = [
        *engine.keys(1, request_configs={"lmcache.tag.user": "a"}),
        *engine.keys(1, request_configs={"lmcache.tag.user": "b"}),
        *engine.keys(1, worker_id=1, world_size=2),
        *engine.keys(1, model_name="another"),
        *engine.keys(1, dtype=torch.float16),
        *engine.keys(2),
    ]
    engine.put([plain], [engine.chunk(1)])
    engine.put([others[0]], [engine.chunk(2)])

    assert engine.get([plain, *others]) == [bytes_of(1), bytes_of(2), None, None, None, None, None]


def test_lmcaches_own_health_check_passes(start: Any, tmp_path: Path) -> None:
    from lmcache.v1.health_monitor.checks.remote_backend_check import RemoteBackendHealthCheck

    engine = start(config=lmdb(tmp_path / "store"))
    check = RemoteBackendHealthCheck(engine.backend)

    assert check.check()
    assert check._put_and_get_check()


def test_a_full_memory_pool_is_a_miss_and_not_a_hang(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"))
    keys = engine.keys(1)
    engine.put(keys, [engine.chunk(1)])
    hoard = []
    while (
        memory := engine.manager.allocate(engine.metadata.get_shapes(), [torch.bfloat16], busy_loop=False)
    ) is not None:
        hoard.append(memory)

    assert engine.get(keys) == [None]
    for memory in hoard:
        memory.ref_count_down()
    assert engine.get(keys) == [bytes_of(1)]


def test_a_plugin_of_any_name_works_by_the_connectors_class(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"), plugin="archive", class_name="KVStoreConnector")
    keys = engine.keys(1)

    engine.put(keys, [engine.chunk(1)])

    assert engine.get(keys) == [bytes_of(1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": None}, "no kvstore config is given"),
        ({"config": {"l2": [{"backend": "lmbd", "path": "x"}]}}, "lmbd"),
        ({"config": "/nowhere/kvstore.toml"}, "/nowhere/kvstore.toml"),
        ({"options": (("confg", "x"),)}, "confg"),
        ({"lmcache": (("remote_serde", "cachegen"),)}, "remote_serde = 'cachegen': expected 'naive'"),
    ],
)
def test_a_wrong_configuration_leaves_no_backend_behind(
    start: Any, tmp_path: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_CONFIG", raising=False)
    said: list[str] = []
    monkeypatch.setattr("lmcache.v1.storage_backend.logger.error", lambda text, *values: said.append(text % values))

    engine = start(**({"config": lmdb(tmp_path / "store")} | settings))

    # A backend that is there and has no connection would answer every lookup with a miss.
    assert list(engine.manager.storage_backends) == ["LocalCPUBackend"]
    assert len(said) == 1
    assert message in said[0]


def test_a_url_is_refused_with_what_to_write_instead(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"))
    context = ConnectorContext("kvstore:///etc/kvstore.toml", engine.manager.loop, None, engine.config, engine.metadata)
    adapter = KVStoreConnectorAdapter()

    assert adapter.can_parse(context.url)
    assert not adapter.can_parse("plugin://fs")
    with pytest.raises(IrrecoverableException, match=r"say remote_storage_plugins: \['kvstore'\]"):
        adapter.create_connector(context)


def test_hashes_that_another_process_does_not_find_are_warned_of(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvstore.lmcache")

    start(config=lmdb(tmp_path / "store"), lmcache=(("pre_caching_hash_algorithm", "builtin"),))

    assert "pre_caching_hash_algorithm = 'builtin'" in caplog.text


def test_keys_survive_as_lmcache_writes_them(start: Any, tmp_path: Path) -> None:
    engine = start(config=lmdb(tmp_path / "store"))
    (key,) = engine.keys(0xABCDEF, request_configs={"lmcache.tag.user": "a"})
    engine.put([key], [engine.chunk(1)])

    assert engine.get([CacheEngineKey.from_string(key.to_string())]) == [bytes_of(1)]
