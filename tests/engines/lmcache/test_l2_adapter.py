"""The L2 adapter, made by LMCache's factory and driven as its controllers do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="LMCache is not installed (make test-engines)")

from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.internal_api import L2AdapterListener

from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import Registry
from kvstore.testing import FaultyBackend, register_backend
from kvstore.types import PutStatus
from tests.engines.lmcache.adapter import LAYOUTS, NBYTES, SHAPE, Server, keys, memory
from tests.engines.lmcache.engine import content, lmdb

pytestmark = pytest.mark.engine


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers = []

    def make(**params: Any) -> Server:
        servers.append(Server(**params))
        return servers[-1]

    yield make
    for server in servers:
        server.adapter.close()


class Listener(L2AdapterListener):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.stored: dict[Any, int] = {}
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored |= dict(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


def test_objects_come_back_bit_for_bit(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(config=lmdb(tmp_path / "store"))
    wanted, out = keys(1, 2, 3), [memory(), memory(), memory()]

    result = server.store(wanted[:2], [memory(1), memory(2)])

    assert (result.is_successful(), result.bytes_transferred()) == (True, 2 * NBYTES)
    assert server.look_up(wanted) == [0, 1]
    assert server.load(wanted, out) == [0, 1]
    assert [bytes(one.byte_array) for one in out[:2]] == [content(NBYTES, i).numpy().tobytes() for i in (1, 2)]
    assert not out[2].raw_tensor.any()
    assert [one.get_ref_count() for one in out] == [1, 1, 1]


def test_what_is_there_is_not_stored_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(config=lmdb(tmp_path / "store"))
    server.store(keys(1), [memory(1)])

    again = server.store(keys(1, 2), [memory(1), memory(2)])

    assert (again.is_successful(), again.bytes_transferred()) == (True, NBYTES)


def test_the_three_notifiers_are_three_descriptors(serve: Callable[..., Server], tmp_path: Path) -> None:
    adapter = serve(config=lmdb(tmp_path / "store")).adapter
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}

    assert len(fds) == 3
    adapter.close()
    adapter.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_ranks_groups_salts_models_and_dtypes_are_other_objects(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(config=lmdb(tmp_path / "store"))
    server.store(keys(1), [memory(1)])
    others = [
        *keys(1, kv_rank=0x02010201),
        *keys(1, object_group_id=1),
        *keys(1, cache_salt="a"),
        *keys(1, model_name="other"),
        *keys(2),
    ]

    assert server.look_up([*keys(1), *others], LAYOUTS | {1: LAYOUTS[0]}) == [0]
    assert server.load([*keys(1), *others], [memory() for _ in range(6)]) == [0]
    assert server.look_up(keys(1), {0: MemoryLayoutDesc([SHAPE], [torch.float16])}) == []
    assert server.load(keys(1), [memory(dtype=torch.float16)]) == []


def test_groups_of_other_sizes_are_stored_in_one_task(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(config=lmdb(tmp_path / "store"))
    small = torch.Size([1, 2, 32, 8])
    wanted = [*keys(1), *keys(1, object_group_id=1)]
    layouts = LAYOUTS | {1: MemoryLayoutDesc([small], [torch.bfloat16])}

    assert server.store(wanted, [memory(1), memory(2, small)]).is_successful()
    out = [memory(), memory(shape=small)]
    assert server.look_up(wanted, layouts) == [0, 1]
    assert server.load(wanted, out) == [0, 1]
    assert torch.equal(out[1].raw_tensor, content(small.numel() * 2, 2))


def test_a_lookup_without_layouts_finds_what_this_process_stored(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(config=lmdb(tmp_path / "store"))
    server.store(keys(1), [memory(1)])

    assert server.look_up(keys(1, 2), {0: MemoryLayoutDesc([], [])}) == [0]


def test_listeners_and_usage_follow_stores_loads_and_deletes(serve: Callable[..., Server], tmp_path: Path) -> None:
    adapter, listener = (server := serve(config=lmdb(tmp_path / "store"))).adapter, Listener()
    adapter.register_listener(listener)
    wanted = keys(1, 2)
    server.store(wanted, [memory(1), memory(2)])
    server.load(wanted, [memory(), memory()])

    assert adapter.get_usage().total_bytes_used == 2 * NBYTES
    adapter.delete([*wanted[:1], *keys(9)])

    assert listener.stored == dict.fromkeys(wanted, NBYTES)
    assert listener.accessed == wanted
    assert listener.deleted == wanted[:1]
    assert adapter.get_usage().total_bytes_used == NBYTES
    assert server.look_up(wanted) == [1]
    assert not adapter.supports_global_eviction


def test_a_damaged_object_is_a_miss(serve: Callable[..., Server], tmp_path: Path) -> None:
    config = lmdb(tmp_path / "store", codec="none")
    server = serve(config=config)
    server.store(keys(1, 2), [memory(1), memory(2)])
    server.adapter.close()
    database = tmp_path / "store" / "data.mdb"
    data = bytearray(database.read_bytes())
    data[data.index(content(NBYTES, 1)[:2048].numpy().tobytes()) + 5] ^= 1
    database.write_bytes(data)
    server = serve(config=config)

    assert server.load(keys(1, 2), [memory(), memory()]) == [1]
    assert server.look_up(keys(1, 2)) == [1]
    assert server.adapter.report_status()["corrupt"] == 1


def test_a_medium_that_refuses_is_a_store_without_success(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, name = register_backend(lambda: FaultyBackend(MemoryBackend(), put_many=PutStatus.FULL))
    monkeypatch.setattr(Registry, "discover", lambda **_: registry)
    server = serve(config={"l2": [{"backend": name, "capacity": "64MiB"}]})
    server.adapter.register_listener(listener := Listener())

    assert not server.store(keys(1), [memory(1)]).is_successful()
    assert listener.stored == {}
    assert server.look_up(keys(1)) == []


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"config": None}, ValueError, "no kvstore config is given"),
        ({"confg": "x"}, ValueError, "did you mean 'config'"),
        ({"config": {"l2": [{"backend": "lmdb", "path": "/proc/nowhere"}]}}, Exception, "/proc/nowhere"),
    ],
)
def test_a_wrong_configuration_stops_the_server_from_starting(
    params: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_CONFIG", raising=False)

    with pytest.raises(error, match=message):
        Server(**params)


def test_a_closed_adapter_answers_and_does_not_hang(serve: Callable[..., Server], tmp_path: Path) -> None:
    adapter = serve(config=lmdb(tmp_path / "store")).adapter
    assert adapter.report_status()["is_healthy"]
    adapter.close()

    assert not adapter.report_status()["is_healthy"]
