"""Whatever a backend does wrong is a miss, a counter and a health state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, BlockStatus
from kvstore.backend import Backend
from tests import doubles
from tests.support import MakeKey, OpenDouble, blocks_of, same_bytes


@pytest.mark.parametrize("broken", [doubles.RaisingBackend, doubles.NoneBackend, doubles.ShortBackend])
def test_a_broken_backend_is_a_miss_and_a_counter(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, broken: Callable[[], Backend]
) -> None:
    cache = open_double(broken)
    key, blocks = make_key(3), blocks_of(spec, 3)
    out = torch.full_like(blocks, 7.0)

    cache.put(key, blocks)
    cache.flush(10)

    delivered = cache.get(key, out)

    assert same_bytes(out[:delivered], blocks[:delivered])
    assert same_bytes(out[delivered:], torch.full_like(blocks, 7.0)[delivered:])
    assert cache.lookup(key).blocks == 0
    assert cache.delete(key) == 0
    tier = cache.stats().tiers[0].counters
    assert tier.io_errors > 0
    assert tier.stored == 0
    assert tier.refused_medium == 3
    assert cache.health().state != "ok"


def test_a_backend_that_delivers_nothing_it_promised_is_a_miss(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    cache = open_double(doubles.LyingBackend)
    key, blocks = make_key(3), blocks_of(spec, 3)

    assert cache.get(key, torch.zeros_like(blocks)) == 0
    assert cache.get_each(key, torch.zeros_like(blocks)) == [BlockStatus.ABSENT] * 3


def test_a_failing_tier_logs_one_line(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_double(doubles.RaisingBackend)
    key, blocks = make_key(2), blocks_of(spec, 2)

    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            cache.get(key, torch.zeros_like(blocks))

    assert len([r for r in caplog.records if r.name.startswith("kvstore")]) == 1


def test_the_breaker_stops_asking_a_failing_tier(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    cache = open_double(doubles.RaisingBackend)
    key, blocks = make_key(1), blocks_of(spec, 1)

    for _ in range(30):
        cache.get(key, torch.zeros_like(blocks))

    tier = cache.stats().tiers[0].counters
    assert tier.io_errors == 5
    assert tier.rejected_by_breaker == 25
    assert cache.health().tiers[cache.config.l2[0].name].state == "down"


def test_another_tier_is_not_hurt_by_a_broken_one(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    cache = open_double(doubles.RaisingBackend, doubles.CountingBackend)
    key, blocks = make_key(4), blocks_of(spec, 4)
    cache.put(key, blocks)
    cache.flush(10)
    out = torch.zeros_like(blocks)

    assert cache.get(key, out) == 4
    assert same_bytes(out, blocks)
    assert cache.health().state == "degraded"


@pytest.mark.parametrize("l1", [{"enabled": False}, {"capacity": "4MiB"}], ids=["no L1", "L1"])
def test_a_tier_read_by_its_own_threads_gives_the_same_bytes(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, l1: dict[str, Any]
) -> None:
    backend = doubles.PooledBackend()
    key, blocks = make_key(30), blocks_of(spec, 30)
    cache = open_double(lambda: backend, l1=l1)
    cache.put(key, blocks)
    cache.flush(10)
    if cache._state is not None and cache._state.stack.l1 is not None:
        cache._state.stack.l1.clear()
    out, each = torch.zeros_like(blocks), torch.zeros_like(blocks)

    assert cache.get_each(key, each) == [BlockStatus.DELIVERED] * 30
    assert cache.get(key, out) == 30
    assert same_bytes(out, blocks)
    assert same_bytes(each, blocks)


def test_a_hung_read_ends_at_the_deadline_and_still_fills_l1(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    backend = doubles.GatedBackend()
    cache = open_double(lambda: backend, l1={"capacity": "4MiB"}, deadline="300ms")
    key, blocks = make_key(4), blocks_of(spec, 4)
    cache.put(key, blocks)
    cache.flush(10)
    assert cache._state is not None
    assert cache._state.stack.l1 is not None
    cache._state.stack.l1.clear()
    out = torch.full_like(blocks, 7.0)
    backend.gate.clear()

    started = time.monotonic()
    assert cache.get(key, out) == 0
    assert time.monotonic() - started < 2.0
    assert same_bytes(out, torch.full_like(blocks, 7.0))

    backend.gate.set()
    deadline = time.monotonic() + 10
    while cache.stats().tiers[0].counters.late < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cache.lookup(key).by_tier["l1"] == 4
    assert cache.get(key, out) == 4
    assert same_bytes(out, blocks)
    assert cache.stats().l1.pinned_blocks == 0  # type: ignore[union-attr]


def test_hung_reads_never_use_more_than_twice_the_threads(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    backend = doubles.GatedBackend()
    cache = open_double(lambda: backend, deadline="50ms", workers=2)
    key, blocks = make_key(4), blocks_of(spec, 4)
    cache.put(key, blocks)
    cache.flush(10)
    backend.gate.clear()
    assert cache._state is not None
    pool = cache._state.stack.tiers[0].tier.workers

    for _ in range(12):
        cache.get(key, torch.zeros_like(blocks))

    assert len(pool._threads) <= 2 * 2 + 2
    backend.gate.set()


def test_a_full_queue_refuses_the_rest_of_a_put_and_counts_it(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    backend = doubles.GatedWrites()
    cache = open_double(lambda: backend, l1={"capacity": "8MiB"}, queue=10 * spec.nbytes)
    backend.gate.clear()
    key, blocks = make_key(25), blocks_of(spec, 25)

    assert cache.put(key, blocks) == 25

    assert cache.stats().tiers[0].counters.refused_queue_full == 15
    backend.gate.set()
    cache.flush(10)
    assert cache.stats().tiers[0].counters.stored == 10
    assert cache.stats().l1.pinned_blocks == 0  # type: ignore[union-attr]


def test_l1_takes_back_queued_writes_when_nothing_else_can_leave(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    backend = doubles.GatedWrites()
    slots = 16
    cache = open_double(lambda: backend, l1={"capacity": slots * (spec.nbytes + 4096)}, queue=100 * spec.nbytes)
    backend.gate.clear()
    cache.put(make_key(1), blocks_of(spec, 1))
    assert backend.writing.wait(5)
    cache.put(make_key(slots - 1, seed=1), blocks_of(spec, slots - 1))

    assert cache.put(make_key(8, seed=2), blocks_of(spec, 8)) == 8

    stats = cache.stats()
    assert stats.tiers[0].counters.stores_dropped == 8
    backend.gate.set()
    cache.flush(10)


def test_flush_says_which_tier_is_late(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    backend = doubles.GatedWrites()
    cache = open_double(lambda: backend)
    backend.gate.clear()
    cache.put(make_key(1), blocks_of(spec, 1))

    with pytest.raises(TimeoutError, match=r"did not finish within 0.1 s in double-\d+"):
        cache.flush(0.1)

    backend.gate.set()
    cache.flush(10)


def test_close_is_bounded_when_a_tier_hangs(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    backend = doubles.GatedWrites()
    cache = open_double(lambda: backend)
    backend.gate.clear()
    cache.put(make_key(1), blocks_of(spec, 1))
    assert backend.writing.wait(5)

    started = time.monotonic()
    cache.close()

    assert time.monotonic() - started < 5.5
    backend.gate.set()
