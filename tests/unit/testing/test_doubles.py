from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import BlockSpec, KVCache, Namespace
from kvstore.backend import Backend, BackendContext, Capability, PutItem
from kvstore.errors import BackendUnavailableError
from kvstore.memory_backend import MemoryBackend, MemoryOptions
from kvstore.plugins import Registry
from kvstore.plugins.validate import interface_problems
from kvstore.testing import (
    FaultyBackend,
    HangingBackend,
    LyingBackend,
    RecordingBackend,
    SlowBackend,
    TornBackend,
    WrappingBackend,
    register_backend,
)
from kvstore.testing.samples import Received, bytes_of, call, item_of, names_of, put, read
from kvstore.types import Presence, PutStatus, ReadStatus

Wrap = Callable[[Callable[[Backend], WrappingBackend]], WrappingBackend]
ALL = (FaultyBackend, HangingBackend, LyingBackend, RecordingBackend, TornBackend, WrappingBackend)


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    opened: list[Backend] = []

    def make(double: Callable[[Backend], WrappingBackend]) -> WrappingBackend:
        wrapped = double(MemoryBackend())
        wrapped.open(BackendContext(tier="t", options=MemoryOptions()))
        opened.append(wrapped)
        return wrapped

    yield make
    for backend in opened:
        backend.close()


@pytest.mark.parametrize("double", [*ALL, lambda inner: SlowBackend(inner, 0.0)])
def test_every_double_fulfils_the_contracts_signatures(double: Callable[[Backend], Backend]) -> None:
    assert list(interface_problems(double(MemoryBackend()), Backend)) == []


def test_a_wrapper_changes_nothing(wrap: Wrap) -> None:
    backend = wrap(WrappingBackend)
    assert backend.capabilities == MemoryBackend.capabilities
    assert put(backend, item_of(1), item_of(2)) == [PutStatus.STORED] * 2
    assert read(backend, names_of([1, 2, 3])) == [bytes_of(1, 5000), bytes_of(2, 5000), None]
    assert backend.exists_many(names_of([1, 3]), call()) == [Presence.PRESENT, Presence.ABSENT]
    assert backend.delete_many(names_of([1]), call()) == 1
    assert [info.name for info in backend.scan()] == names_of([2])
    assert backend.usage().records == 1
    assert backend.epoch(b"n") == backend.inner.epoch(b"n")
    backend.drop(names_of([2])[0])
    assert backend.usage().records == 0


def test_a_faulty_one_answers_its_statuses_while_it_fails(wrap: Wrap) -> None:
    statuses: dict[str, Any] = {"get_many": ReadStatus.TIMEOUT, "put_many": PutStatus.FULL}
    statuses["exists_many"] = Presence.UNKNOWN
    faulty = wrap(lambda inner: FaultyBackend(inner, **statuses))
    assert put(faulty, item_of(1)) == [PutStatus.FULL]
    assert faulty.exists_many(names_of([1]), call()) == [Presence.UNKNOWN]
    assert faulty.get_many(names_of([1, 2]), Received(), call()) == [ReadStatus.TIMEOUT] * 2
    assert isinstance(faulty, FaultyBackend)
    faulty.failing = False
    assert put(faulty, item_of(1)) == [PutStatus.STORED]
    assert read(faulty, names_of([1])) == [bytes_of(1, 5000)]


def test_a_faulty_one_raises_what_it_was_given(wrap: Wrap) -> None:
    faulty = wrap(lambda inner: FaultyBackend(inner, epoch=BackendUnavailableError("gone"), usage=OSError("EIO")))
    with pytest.raises(BackendUnavailableError, match="gone"):
        faulty.epoch(b"n")
    with pytest.raises(OSError, match="EIO"):
        faulty.usage()
    with pytest.raises(TypeError, match="no operation 'fetch'"):
        FaultyBackend(MemoryBackend(), fetch=OSError())


def test_a_slow_one_takes_its_time_where_it_was_told(wrap: Wrap) -> None:
    slow = wrap(lambda inner: SlowBackend(inner, 0.05, ("exists_many",)))
    assert Capability.CALLER_READS not in slow.capabilities
    start = time.monotonic()
    slow.exists_many(names_of([1]), call())
    middle = time.monotonic()
    put(slow, item_of(1))
    assert middle - start >= 0.05
    assert time.monotonic() - middle < 0.05


def test_a_hanging_one_hangs_until_it_is_released(wrap: Wrap) -> None:
    hanging = wrap(lambda inner: HangingBackend(inner, ("exists_many",)))
    assert isinstance(hanging, HangingBackend)
    answers: list[list[Presence]] = []
    thread = threading.Thread(target=lambda: answers.append(hanging.exists_many(names_of([1]), call(0.0))))
    thread.start()
    assert hanging.entered.wait(10)
    assert put(hanging, item_of(1)) == [PutStatus.STORED]
    assert answers == []
    hanging.release()
    thread.join(10)
    assert answers == [[Presence.PRESENT]]


def test_a_recording_one_remembers(wrap: Wrap) -> None:
    recording = wrap(RecordingBackend)
    assert isinstance(recording, RecordingBackend)
    mine = bytearray(bytes_of(1, 5000))
    put(recording, PutItem(names_of([1])[0], [memoryview(mine)]))
    mine[:] = bytes(5000)
    recording.touch_many(names_of([1]))
    read(recording, names_of([1, 2]), call(leading_only=True))
    assert recording.operations[1:] == ["put_many", "touch_many", "get_many"]
    assert b"".join(recording.put_items[0].buffers) == bytes_of(1, 5000)
    assert recording.touched == [names_of([1])]
    assert recording.asked == [names_of([1, 2])]
    assert recording.calls[0].leading_only


def test_a_torn_one_damages_every_way_to_read(wrap: Wrap) -> None:
    torn = wrap(TornBackend)
    put(torn, item_of(1))
    damaged = bytes_of(1, 5000)[:2500] + bytes(2500)
    received = Received()
    torn.get_ranges(names_of([1]), [(2000, 3000)], received, call())
    assert read(torn, names_of([1])) == [damaged]
    assert received.data == {0: damaged[2000:3000]}
    short = wrap(lambda inner: TornBackend(inner, lambda good: good[:10]))
    put(short, item_of(1))
    assert read(short, names_of([1])) == [bytes_of(1, 5000)[:10]]


def test_a_lying_one_delivers_nothing(wrap: Wrap) -> None:
    lying = wrap(LyingBackend)
    received = Received()
    assert lying.exists_many(names_of([1]), call()) == [Presence.PRESENT]
    assert lying.get_many(names_of([1]), received, call()) == [ReadStatus.OK]
    assert received.data == {}


def test_a_registered_double_is_a_tier_of_a_cache() -> None:
    recording = RecordingBackend(MemoryBackend())
    registry, name = register_backend(lambda: recording, max_writers=2)
    assert registry.backend(name).max_writers == 2
    spec = BlockSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")
    config = {"l1": {"enabled": False}, "l2": [{"backend": name}]}
    with KVCache.open(config, spec=spec, namespace=Namespace(model="m", revision="r"), registry=registry):
        assert recording.operations[0] == "open"
    assert recording.operations[-1] == "close"
    again, other = register_backend(MemoryBackend, registry, name="mine")
    assert (again, other) == (registry, "mine")
    assert isinstance(registry, Registry)
