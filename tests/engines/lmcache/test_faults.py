"""What LMCache sees when the medium is damaged, slow or gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed (make test-engines)")

from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import Registry
from kvstore.testing import FaultyBackend, HangingBackend, register_backend
from kvstore.types import PutStatus
from tests.doubles import PooledBackend
from tests.engines.lmcache.engine import lmdb, until
from tests.engines.lmcache.test_connector import bytes_of

pytestmark = pytest.mark.engine


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a config over a backend double; every cache of the test finds it installed."""

    def make(backend: Any, **options: Any) -> dict[str, Any]:
        registry, name = register_backend(lambda: backend)
        monkeypatch.setattr(Registry, "discover", lambda **_: registry)
        return {"l2": [{"backend": name, "capacity": "64MiB", "deadline": "300ms"} | options]}

    return make


def test_a_damaged_record_is_a_miss_and_is_stored_again(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "store"
    engine = start(config=lmdb(path, codec="none"))
    keys = engine.keys(1, 2, 3)
    engine.put(keys, [engine.chunk(seed) for seed in (1, 2, 3)])
    engine.stop()
    database = path / "data.mdb"
    data = bytearray(database.read_bytes())
    at = data.index(bytes_of(2)[:2048])
    data[at + 100] ^= 1
    database.write_bytes(data)

    engine = start(config=lmdb(path, codec="none"))

    assert engine.get(keys) == [bytes_of(1), None, bytes_of(3)]
    assert engine.connector.counters.corrupt == 1
    assert engine.backend.batched_contains(keys) == 1
    engine.put([keys[1]], [engine.chunk(2)])
    assert engine.get(keys) == [bytes_of(1), bytes_of(2), bytes_of(3)]


def test_a_medium_that_fails_is_a_miss_and_costs_no_memory(start: Any, double: Any) -> None:
    medium = FaultyBackend(MemoryBackend(), get_many=OSError("broken"), exists_many=OSError("broken"))
    medium.failing = False
    engine = start(config=double(medium))
    keys = engine.keys(1, 2)
    engine.put(keys, [engine.chunk(1), engine.chunk(2)])
    free = engine.free_bytes()
    medium.failing = True

    assert engine.get(keys) == [None, None]
    assert engine.backend.batched_contains(keys) == 0
    assert engine.free_bytes() == free


def test_a_medium_that_refuses_is_not_an_error_of_the_engine(start: Any, double: Any) -> None:
    engine = start(config=double(FaultyBackend(MemoryBackend(), put_many=PutStatus.FULL)))
    keys = engine.keys(1)

    engine.put(keys, [engine.chunk(1)])

    assert engine.get(keys) == [None]
    assert engine.connector.counters.refused == 1


def test_a_medium_that_hangs_costs_its_deadline_and_no_memory(start: Any, double: Any) -> None:
    medium = HangingBackend(PooledBackend(), ("get_many", "exists_many"))
    medium.release()
    engine = start(config=double(medium))
    keys = engine.keys(1)
    engine.put(keys, [engine.chunk(1)])
    free = engine.free_bytes()
    medium.hang()
    begin = time.monotonic()
    try:
        assert engine.get(keys) == [None]
        assert engine.backend.batched_contains(keys) == 0
        assert time.monotonic() - begin < 10
    finally:
        medium.release()
    assert engine.free_bytes() == free


def test_a_load_that_lmcache_gave_up_returns_its_memory(start: Any, double: Any) -> None:
    medium = HangingBackend(PooledBackend())
    medium.release()
    engine = start(config=double(medium, deadline="20s"), lmcache=(("blocking_timeout_secs", 1),))
    keys = engine.keys(1)
    engine.put(keys, [engine.chunk(1)])
    free = engine.free_bytes()
    medium.hang()
    try:
        assert engine.get(keys) == [None]
        assert engine.free_bytes() < free  # the store may still write there
    finally:
        medium.release()

    until(lambda: engine.free_bytes() == free)
