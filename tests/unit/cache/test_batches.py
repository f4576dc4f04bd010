"""Writes reach a backend in batches of the shape it wants, whole runs together, and nothing waits for long."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore import BlockSpec, PluginError
from kvstore.backend import BatchShape, PutHint
from kvstore.l2.write_queue import HOLD_S, Write, WriteQueue
from kvstore.record import RecordMeta
from tests.support import MakeKey, blocks_of, key_of
from tests.unit.cache.stacks import Layers, ShapedBackend, open_layers

OFF = {"enabled": False}
OpenLayers = Callable[..., Layers]


@pytest.fixture
def layers(spec: BlockSpec, request: pytest.FixtureRequest) -> OpenLayers:
    def make(l1: dict[str, Any], *, max_writers: int = 1, **tiers: Any) -> Layers:
        described = {name: t if isinstance(t, tuple) else (t, {}) for name, t in tiers.items()}
        opened = open_layers(spec, l1, described, max_writers=max_writers)
        request.addfinalizer(opened.cache.close)
        return opened

    return make


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Queued:
    """A write queue with a clock of its own, filled by sequence and position."""

    def __init__(self, **shape: int) -> None:
        self.clock = Clock()
        self.queue = WriteQueue(BatchShape(**shape), self.clock)
        self._seq = 0

    def add(self, sequence: str, *positions: int, nbytes: int = 10) -> None:
        for position in positions:
            self._seq += 1
            name, parent = f"{sequence}{position}".encode(), f"{sequence}{position - 1}".encode()
            hint = PutHint(parent if position else b"", position)
            raw = memoryview(bytes(nbytes))
            self.queue.append(Write(RecordMeta(name.ljust(32), None, 0, 0), name, hint, raw, print, seq=self._seq))

    def batch(self, urgent: int = 0) -> list[str]:
        return [write.name.decode() for write in self.queue.next_batch(urgent)]


def test_a_batch_is_cut_at_blocks_and_at_bytes() -> None:
    queued = Queued(blocks=3, nbytes=100)
    queued.add("a", 0, 1, 2, 3)
    queued.add("b", 0, 1, nbytes=60)
    queued.add("c", 0, nbytes=500)

    assert queued.batch() == ["a0", "a1", "a2"]
    assert queued.batch() == ["a3", "b0", "b1"]
    assert queued.batch() == ["c0"]
    assert queued.batch() == []


def test_runs_are_gathered_from_sequences_that_take_turns() -> None:
    queued = Queued(blocks=4, align=4)
    for position in range(4):
        queued.add("a", position)
        queued.add("b", position)

    assert queued.batch() == ["a0", "a1", "a2", "a3"]
    assert queued.batch() == ["b0", "b1", "b2", "b3"]


def test_a_run_ends_at_the_alignment_and_begins_wherever_it_does() -> None:
    queued = Queued(blocks=8, align=4)
    queued.add("a", *range(2, 10))

    assert queued.batch() == ["a2", "a3", "a4", "a5", "a6", "a7"]
    assert queued.batch() == []  # 8 and 9 may still become more
    queued.clock.now += HOLD_S
    assert queued.batch() == ["a8", "a9"]


def test_a_run_that_may_grow_lets_others_pass() -> None:
    queued = Queued(blocks=8, align=4)
    queued.add("a", 0, 1)
    queued.add("b", 0, 1, 2, 3)
    queued.add("c", -1)

    assert queued.batch() == ["b0", "b1", "b2", "b3", "c-1"]
    assert queued.queue.ready_in(0) == pytest.approx(HOLD_S)
    queued.add("a", 2, 3)
    assert queued.batch() == ["a0", "a1", "a2", "a3"]
    assert queued.queue.ready_in(0) is None


def test_what_is_urgent_is_not_held_back() -> None:
    queued = Queued(blocks=8, align=4)
    queued.add("a", 0, 1)
    queued.add("b", 0)

    assert queued.queue.ready_in(2) == 0
    assert queued.batch(urgent=2) == ["a0", "a1"]
    assert queued.batch(urgent=3) == ["b0"]


def test_a_run_that_was_taken_does_not_grow() -> None:
    queued = Queued(blocks=8, align=4)
    queued.add("a", 0)
    assert queued.batch(urgent=1) == ["a0"]
    queued.add("a", 1, 2, 3)

    assert queued.batch() == ["a1", "a2", "a3"]


def test_taking_back_and_removing_leave_no_hole_to_wait_for() -> None:
    queued = Queued(blocks=8, align=4)
    queued.add("a", 0, 1, 2)
    assert [w.name for w in queued.queue.take_newest(1)] == [b"a2"]
    queued.add("b", 0, 1, 2)
    assert [w.name for w in queued.queue.remove(frozenset({b"b1".ljust(32)}))] == [b"b1"]

    assert len(queued.queue) == 4
    assert queued.batch() == ["a0", "a1", "b0", "b2"]
    assert len(queued.queue) == 0
    queued.add("c", 0, 1)
    assert len(queued.queue.remove(None)) == 2
    assert queued.queue.ready_in(0) is None


def shaped(shape: BatchShape) -> ShapedBackend:
    backend = ShapedBackend()
    backend.shape = shape
    return backend


@pytest.mark.parametrize("l1", [OFF, {"capacity": "16MiB"}], ids=["no L1", "L1"])
def test_batches_end_where_packs_do(layers: OpenLayers, spec: BlockSpec, make_key: MakeKey, l1: dict[str, Any]) -> None:
    backend = shaped(BatchShape(blocks=32, nbytes=1 << 30, align=16))
    stack = layers(l1, tier=(backend, {"queue": 300 * spec.nbytes}))
    key, blocks = make_key(77), blocks_of(spec, 77)

    stack.cache.put(key, blocks)
    stack.cache.flush(10)

    known = make_key(1).position_known
    assert sorted(itertools.chain(*backend.batches)) == (list(range(77)) if known else [-1] * 77)
    for batch in backend.batches if known else ():
        runs = sorted(batch)
        assert len(batch) <= 32
        assert runs[0] % 16 == 0
        assert (runs[-1] + 1) % 16 == 0 or runs[-1] == 76
        assert runs == list(range(runs[0], runs[-1] + 1))


def test_puts_block_by_block_of_several_sequences_become_packs(layers: OpenLayers, spec: BlockSpec) -> None:
    backend = shaped(BatchShape(blocks=16, nbytes=1 << 30, align=16))
    stack = layers({"capacity": "16MiB"}, tier=(backend, {"queue": 300 * spec.nbytes}))
    keys, blocks = [key_of("tokens", 16, seed=seed) for seed in range(3)], blocks_of(spec, 16)

    for i in range(16):
        for key in keys:
            stack.cache.put(key[i : i + 1], blocks[i : i + 1])
    stack.cache.flush(10)

    assert sum(map(len, backend.batches)) == 48
    assert max(map(len, backend.batches)) >= 4, "held back long enough to gather some"


def test_a_held_back_run_is_written_soon_and_at_once_when_asked(layers: OpenLayers, spec: BlockSpec) -> None:
    backend = shaped(BatchShape(blocks=16, nbytes=1 << 30, align=16))
    stack = layers({"capacity": "16MiB"}, tier=backend)
    key = key_of("tokens", 8)
    stack.cache.put(key[:3], blocks_of(spec, 3))
    deadline = time.monotonic() + 5
    while not backend.batches and time.monotonic() < deadline:
        time.sleep(0.005)
    assert backend.batches == [[2, 1, 0]]

    stack.cache.put(key[3:5], blocks_of(spec, 2))
    started = time.monotonic()
    stack.cache.flush(5)
    assert backend.batches[1:] == [[4, 3]]
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("answer", [None, BatchShape(blocks=0), BatchShape(align=64), BatchShape(nbytes=-1), 1 / 3])
def test_a_senseless_batch_shape_is_an_error_at_open(layers: OpenLayers, answer: Any) -> None:
    backend = shaped(answer)
    with pytest.raises(PluginError, match="tier 'tier': batch_shape of backend 'layer-0' answered"):
        layers({"capacity": "4MiB"}, tier=backend)
    assert backend._context is None  # closed again


def test_several_writer_threads_store_everything_once(layers: OpenLayers, spec: BlockSpec, make_key: MakeKey) -> None:
    backend = shaped(BatchShape(blocks=4, nbytes=1 << 30))
    stack = layers({"capacity": "16MiB"}, tier=(backend, {"queue": 300 * spec.nbytes}), max_writers=4)
    key, blocks = make_key(100), blocks_of(spec, 100)

    stack.cache.put(key, blocks)
    stack.cache.flush(10)

    assert sorted(name[17:] for name in backend.put_names) == sorted(key.digests)
    assert stack.l1.counters.pinned_blocks == 0
