"""Tiers that hang, fail or come late when they are opened, and media that do not answer afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvstore import BackendTimeoutError, BackendUnavailableError, BlockSpec, opening
from kvstore.backend import BackendContext, Usage
from tests import doubles
from tests.support import MakeKey, blocks_of, same_bytes
from tests.unit.cache.stacks import Layers, open_layers

Open = Callable[..., Layers]


class LateBackend(doubles.CountingBackend):
    """Opens only once its gate is open, and says when it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.closed = threading.Event()

    def open(self, context: BackendContext) -> None:
        self.gate.wait(30)
        super().open(context)

    def close(self) -> None:
        super().close()
        self.closed.set()


class MissingBackend(doubles.CountingBackend):
    """Cannot be opened until it is there."""

    there = False
    attempts = 0

    def open(self, context: BackendContext) -> None:
        self.attempts += 1
        if not self.there:
            raise BackendUnavailableError("nothing answers at that address; start the server")
        super().open(context)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_S", 0.2)
    monkeypatch.setattr(opening, "FIRST_RETRY_S", 0.1)


@pytest.fixture
def late() -> Iterator[LateBackend]:
    backend = LateBackend()
    yield backend
    backend.gate.set()


@pytest.fixture
def layers(spec: BlockSpec, request: pytest.FixtureRequest) -> Open:
    def make(**tiers: Any) -> Layers:
        opened = open_layers(spec, {"capacity": "4MiB"}, tiers)
        request.addfinalizer(opened.cache.close)
        return opened

    return make


def until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@pytest.mark.usefixtures("quick")
def test_a_required_tier_that_does_not_open_in_time_is_an_error(layers: Open, late: LateBackend) -> None:
    with pytest.raises(BackendTimeoutError, match=r"tier 'late': backend 'layer-0' did not open within 0.2 s"):
        layers(late=(late, {}))
    assert not late.closed.is_set()

    late.gate.set()
    assert late.closed.wait(5)  # what opens too late is closed again


@pytest.mark.usefixtures("quick")
def test_a_tier_that_hangs_at_open_is_left_out_and_joins_later(
    layers: Open, late: LateBackend, spec: BlockSpec, make_key: MakeKey
) -> None:
    started = time.monotonic()
    stack = layers(late=(late, {"required": False}), other=(doubles.CountingBackend(), {}))
    assert time.monotonic() - started < 5
    health = stack.cache.health()
    assert (health.state, health.tiers["late"].state, health.tiers["other"].state) == ("degraded", "down", "ok")
    assert "did not open within" in health.tiers["late"].detail

    late.gate.set()

    assert until(lambda: stack.cache.health().state == "ok")
    assert [t.name for t in stack.cache.stats().tiers] == ["late", "other"]
    key, blocks = make_key(3), blocks_of(spec, 3)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    assert stack.leads("late", key) == stack.leads("other", key) == 3


@pytest.mark.usefixtures("quick")
def test_a_tier_that_was_not_there_joins_at_its_place(layers: Open, spec: BlockSpec, make_key: MakeKey) -> None:
    missing = MissingBackend()
    stack = layers(
        upper=(doubles.CountingBackend(), {}),
        missing=(missing, {"required": False}),
        lower=(doubles.CountingBackend(), {}),
    )
    key, blocks = make_key(3), blocks_of(spec, 3)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    assert until(lambda: missing.attempts >= 2)
    assert stack.cache.health().tiers["missing"].state == "down"

    missing.there = True

    assert until(lambda: stack.cache.health().state == "ok")
    assert [t.name for t in stack.cache.stats().tiers] == ["upper", "missing", "lower"]
    stack.drop("upper", key.digests)
    stack.l1.clear()
    out = torch.zeros_like(blocks)
    for _ in range(2):  # the second read is kept in L1, and moves up from there
        assert stack.cache.get(key, out) == 3
    stack.cache.flush(10)
    assert same_bytes(out, blocks)
    assert stack.leads("missing", key) == 3


@pytest.mark.usefixtures("quick")
def test_a_tier_that_opens_after_the_close_is_closed(layers: Open) -> None:
    class Slow(MissingBackend):
        gate = threading.Event()
        entered = threading.Event()
        closed = threading.Event()

        def open(self, context: BackendContext) -> None:
            if self.attempts:
                self.there = True
                self.entered.set()
                self.gate.wait(10)
            super().open(context)

        def close(self) -> None:
            super().close()
            self.closed.set()

    slow = Slow()
    stack = layers(slow=(slow, {"required": False}))
    assert slow.entered.wait(10)

    stack.cache.close()
    slow.gate.set()

    assert slow.closed.wait(5)


class SilentUsage(doubles.PooledBackend):
    """Does not answer how much it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.asked = 0

    def usage(self) -> Usage:
        self.asked += 1
        self.gate.wait(30)
        return super().usage()


def test_stats_do_not_wait_for_a_silent_medium(layers: Open, spec: BlockSpec, make_key: MakeKey) -> None:
    backend = SilentUsage()
    stack = layers(silent=(backend, {}))
    started = time.monotonic()
    for _ in range(20):
        assert stack.cache.stats().tiers[0].records == -1
    assert time.monotonic() - started < 2
    assert backend.asked == 1

    stack.cache.put(make_key(2), blocks_of(spec, 2))
    stack.cache.flush(10)
    backend.gate.set()
    assert until(lambda: stack.cache.stats().tiers[0].records == 2)


def test_the_backend_is_told_the_size_of_a_block(layers: Open, spec: BlockSpec) -> None:
    backend = doubles.CountingBackend()
    layers(tier=(backend, {}))

    assert backend._context is not None
    assert backend._context.block_bytes == spec.nbytes
