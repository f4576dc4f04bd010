"""Media that are slow, refuse, report trouble by status, or come back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from kvstore import BackendUnavailableError, BlockSpec, ClosedError
from kvstore.backend import Backend, BackendContext, PutItem, Receive
from kvstore.memory_backend import MemoryBackend
from kvstore.types import Call, PutStatus, ReadStatus
from tests import doubles
from tests.support import MakeKey, OpenDouble, blocks_of, same_bytes


class SlowNotes(doubles.PooledBackend):
    """A medium whose small calls hang, as a remote one may."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def touch_many(self, names: Sequence[bytes]) -> None:
        self.gate.wait(30)

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        self.gate.wait(30)
        return super().epoch(namespace, bump=bump)


def test_no_small_call_of_a_slow_medium_makes_the_caller_wait(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    backend = SlowNotes()
    cache = open_double(lambda: backend, l1={"capacity": "4MiB"}, deadline="200ms")
    key, blocks = make_key(3), blocks_of(spec, 3)
    cache.put(key, blocks)
    cache.flush(10)
    backend.gate.clear()

    started = time.monotonic()
    cache.put(key, blocks)
    cache.get(key, torch.zeros_like(blocks))
    cache.get(make_key(2, seed=5), torch.zeros_like(blocks[:2]))
    cache.lookup(make_key(2, seed=6))

    assert time.monotonic() - started < 2.0
    backend.gate.set()


class NoEpoch(MemoryBackend):
    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        raise BackendUnavailableError("the epoch cannot be read")


def test_a_put_that_cannot_be_named_is_counted_as_refused(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    cache = open_double(NoEpoch, l1={"capacity": "4MiB"})

    assert cache.put(make_key(4), blocks_of(spec, 4)) == 4

    tier = cache.stats().tiers[0].counters
    assert (tier.io_errors, tier.refused_medium) == (1, 4)
    assert cache.stats().l1.pinned_blocks == 0  # type: ignore[union-attr]


class Answering(MemoryBackend):
    """Reports trouble by status instead of raising."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        return [ReadStatus.TIMEOUT] * len(names)

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        return [PutStatus.DENIED] * len(items)


def test_trouble_reported_by_status_counts_like_an_error(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    cache = open_double(Answering)
    key, blocks = make_key(2), blocks_of(spec, 2)
    cache.put(key, blocks)
    cache.flush(10)

    for _ in range(10):
        assert cache.get(key, torch.zeros_like(blocks)) == 0

    tier = cache.stats().tiers[0].counters
    assert (tier.timeouts, tier.rejected_by_breaker) == (5, 5)
    assert tier.refused_medium == 2
    assert 1 <= tier.io_errors <= 2  # one batch or two
    assert cache.health().state == "down"


def test_a_suspended_tier_recovers_by_itself(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    class Flaky(MemoryBackend):
        broken = False

        def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
            if self.broken:
                raise BackendUnavailableError("down for a while")
            return super().get_many(names, receive, call)

    backend = Flaky()
    cache = open_double(lambda: backend)
    key, blocks = make_key(2), blocks_of(spec, 2)
    cache.put(key, blocks)
    cache.flush(10)
    out = torch.zeros_like(blocks)
    backend.broken = True
    for _ in range(8):
        assert cache.get(key, out) == 0
    assert cache.lookup(key).blocks == 0, "what cannot be delivered is not advertised"
    backend.broken = False

    deadline = time.monotonic() + 10
    while cache.get(key, out) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)

    assert same_bytes(out, blocks)
    assert cache.lookup(key).blocks == 2
    assert cache.health().state == "ok"


class Unopenable(MemoryBackend):
    def open(self, context: BackendContext) -> None:
        raise ZeroDivisionError("a plugin's bug")


def test_a_backend_that_cannot_be_opened_fails_loudly_or_is_left_out(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    with pytest.raises(BackendUnavailableError, match=r"raised ZeroDivisionError when it was opened: a plugin's bug"):
        open_double(Unopenable)

    cache = open_double(Unopenable, l1={"capacity": "4MiB"}, required=False)
    key, blocks = make_key(2), blocks_of(spec, 2)
    assert cache.put(key, blocks) == 2
    assert cache.get(key, torch.zeros_like(blocks)) == 2
    assert cache.health().state == "degraded"
    assert "ZeroDivisionError" in cache.health().tiers[cache.config.l2[0].name].detail


class FullBackend(MemoryBackend):
    """Has no room until told otherwise."""

    full = True

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        return [PutStatus.FULL] * len(items) if self.full else super().put_many(items, call)


def test_a_tier_that_stores_nothing_is_degraded_and_says_so_once(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FullBackend()
    cache = open_double(lambda: backend)
    for seed in range(5):
        cache.put(make_key(2, seed=seed), blocks_of(spec, 2))
        cache.flush(10)

    assert cache.health().to_dict()["tiers"][cache.config.l2[0].name] == {
        "state": "degraded",
        "detail": "nothing is stored: full",
    }
    assert cache.stats().tiers[0].counters.refused_medium == 10
    assert len([r for r in caplog.records if "stores nothing (full)" in r.getMessage()]) == 1

    backend.full = False
    cache.put(make_key(2), blocks_of(spec, 2))
    cache.flush(10)
    assert cache.health().state == "ok"


class StillAnswering(doubles.GatedBackend):
    """A medium that answers a read even when it was closed meanwhile."""

    def close(self) -> None:
        """Keep everything."""


def test_a_read_that_ends_after_close_hurts_nobody(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    backend = StillAnswering()
    cache = open_double(lambda: backend, l1={"capacity": "4MiB"}, deadline="100ms", workers=1)
    key, blocks = make_key(3), blocks_of(spec, 3)
    cache.put(key, blocks)
    cache.flush(10)
    assert cache._state is not None
    stack = cache._state.stack
    assert stack.l1 is not None
    stack.l1.clear()
    backend.gate.clear()
    assert cache.get(key, torch.zeros_like(blocks)) == 0
    (reader,) = stack.tiers[0].tier.workers._threads
    cache.close()

    backend.gate.set()
    reader.join(10)

    assert not reader.is_alive()


@pytest.mark.parametrize("backend", [doubles.PooledBackend, MemoryBackend])
def test_every_call_during_close_ends_with_a_result_or_closed_error(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, backend: Callable[[], Backend]
) -> None:
    cache = open_double(backend, l1={"capacity": "1MiB"})
    keys = [make_key(20, seed=seed) for seed in range(4)]
    blocks = blocks_of(spec, 20)
    wrong: list[BaseException] = []
    started = threading.Barrier(9)

    def use(number: int) -> None:
        out = torch.zeros_like(blocks)
        key = keys[number % 4]
        calls: list[Callable[[], object]] = [
            lambda: cache.put(key, blocks),
            lambda: cache.get(key, out),
            lambda: cache.acquire(key).release(),
            lambda: cache.prefetch(key),
            lambda: cache.get_each(key, out),
            lambda: cache.delete(key[:2]),
            lambda: cache.lookup(key),
            cache.stats,
        ]
        started.wait()
        try:
            for i in itertools.count(number):
                calls[i % len(calls)]()
        except ClosedError:
            pass
        except BaseException as e:  # noqa: BLE001 - reported by the main thread
            wrong.append(e)

    users = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for user in users:
        user.start()
    started.wait()
    time.sleep(0.3)
    cache.close()
    for user in users:
        user.join(30)

    assert not any(user.is_alive() for user in users)
    assert wrong == []
