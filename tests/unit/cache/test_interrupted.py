"""Calls that end by an exception which is nobody's fault in the tiers: everything is given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from kvstore import BlockSpec, KVCache
from kvstore.backend import Place, Receive
from kvstore.l1.cache import L1Cache
from kvstore.l2.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, Breaker
from kvstore.memory_backend import MemoryBackend
from kvstore.seen import SeenOnce
from kvstore.types import Call, ReadStatus
from tests import doubles
from tests.support import MakeKey, OpenDouble, blocks_of, same_bytes


class _Interrupting:
    """Delivers one record, then Ctrl-C arrives; mixed into a backend."""

    interrupting = False

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        if self.interrupting:
            super().get_many(names[:1], receive, call)  # type: ignore[misc]
            raise KeyboardInterrupt
        answer: list[ReadStatus] = super().get_many(names, receive, call)  # type: ignore[misc]
        return answer


class InterruptingMemory(_Interrupting, MemoryBackend):
    """Read by the calling thread."""


class InterruptingPooled(_Interrupting, doubles.PooledBackend):
    """Read by the tier's threads."""


class InterruptingPlaces(doubles.ParallelBackend):
    """Reads into places; Ctrl-C arrives between giving one out and filling it."""

    interrupting = False

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        if self.interrupting:
            self.read_one(0, names[0], place, done)
            place(1, self.info(names[1], self._records[names[1]][0]))
            raise KeyboardInterrupt
        return super().read_many(names, place, done, call)


def l1_of(cache: KVCache) -> L1Cache:
    assert cache._state is not None
    assert cache._state.stack.l1 is not None
    return cache._state.stack.l1


def free_slots(l1: L1Cache) -> int:
    """Slots that can be had right now."""
    slots = l1.reserve(l1.pool.n_slots, at_any_cost=False)
    l1.release_slots(slots)
    return len(slots)


@pytest.mark.parametrize("call", ["get", "second get", "acquire"])
@pytest.mark.parametrize("backend", [InterruptingMemory, InterruptingPooled, InterruptingPlaces])
def test_an_interrupted_read_gives_every_slot_back(
    open_double: OpenDouble,
    spec: BlockSpec,
    make_key: MakeKey,
    backend: Callable[[], InterruptingMemory | InterruptingPooled | InterruptingPlaces],
    call: str,
) -> None:
    medium = backend()
    cache = open_double(lambda: medium, l1={"capacity": "1MiB"})
    key, blocks = make_key(6), blocks_of(spec, 6)
    cache.put(key, blocks)
    cache.flush(10)
    l1, out = l1_of(cache), torch.zeros_like(blocks)
    if call == "second get":
        l1.clear()
        assert cache.get(key, out) == 6
    l1.clear()
    medium.interrupting = True

    with pytest.raises(KeyboardInterrupt):
        cache.acquire(key) if call == "acquire" else cache.get(key, out)

    medium.interrupting = False
    deadline = time.monotonic() + 10
    while (free := free_slots(l1)) < l1.pool.n_slots and time.monotonic() < deadline:
        time.sleep(0.01)  # reads of the tier's threads keep theirs until they end
    assert free == l1.pool.n_slots
    assert cache.get(key, out) == 6
    assert same_bytes(out, blocks)


def test_an_error_of_the_destination_is_raised_and_not_blamed_on_the_tier(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    cache = open_double(MemoryBackend, l1={"capacity": "1MiB"}, codec="planes")
    key, blocks = make_key(3), torch.ones((3, *spec.shape), dtype=torch.bfloat16)  # decoded, then copied by torch
    cache.put(key, blocks)
    cache.flush(10)
    l1_of(cache).clear()
    with torch.inference_mode():
        room = torch.zeros((3, 2, *spec.shape), dtype=torch.bfloat16)
        strided = room[:, 1]  # may not be written outside of inference mode

    for read in (cache.get, cache.get, cache.get_each):
        with pytest.raises(RuntimeError, match="inference"):
            read(key, strided)

    assert cache.health().state == "ok"
    assert cache.stats().tiers[0].counters.io_errors == 0
    with torch.inference_mode():
        assert cache.get(key, strided) == 3
        assert same_bytes(strided.contiguous(), blocks)


def test_an_interrupted_probe_does_not_suspend_a_tier_for_good() -> None:
    now = [0.0]
    breaker = Breaker("t", clock=lambda: now[0])
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed("get_many", OSError("down"))
    now[0] += FIRST_PAUSE_S

    assert breaker.allow()
    assert not breaker.allow(), "one probe at a time"
    breaker.left()

    assert breaker.allow()
    breaker.succeeded("get_many")
    assert breaker.state == "closed"


def test_what_was_seen_is_bounded_and_the_oldest_is_forgotten_first() -> None:
    seen = SeenOnce(limit=64)
    digests = [bytes([i]) for i in range(200)]
    for digest in digests:
        seen.note([digest])

    remembered = seen.among(digests)

    assert 64 * 7 // 8 <= len(remembered) <= 64
    assert remembered == set(digests[-len(remembered) :])
