"""Media that hang, lie or break while the tier's threads read: who waits, for how long, and for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import BackendUnavailableError, BlockSpec, BlockStatus, KVCache, KVCacheKey, fetch
from kvstore.backend import Place
from kvstore.l2 import breaker
from kvstore.memory_backend import MemoryBackend
from kvstore.types import Call, Presence, ReadStatus
from tests import doubles
from tests.support import MakeKey, OpenDouble, blocks_of, key_of, same_bytes
from tests.unit.cache.reading import Misbehaving, free_slots, l1_of, stored

SOON_S = 0.3
"""What a call may take that waits for nobody, on a busy machine."""


def wait_for(met: Callable[[], bool], seconds: float = 10) -> bool:
    """Poll until a condition is met."""
    deadline = time.monotonic() + seconds
    while not met() and time.monotonic() < deadline:
        time.sleep(0.005)
    return met()


class Hanging(doubles.ParallelBackend):
    """Waits at its gate between giving out a place and filling it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def read_one(self, i: int, name: bytes, place: Place, done: Callable[[int], None]) -> ReadStatus:
        def place_and_wait(k: int, info: Any) -> Any:
            places = place(k, info)
            self.gate.wait(30)
            return places

        return super().read_one(i, name, place_and_wait, done)

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        self.gate.wait(30)
        return super().exists_many(names, call)


def test_a_place_belongs_to_its_read_until_that_ends(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    medium = Hanging()
    slots = 12
    cache = open_double(lambda: medium, l1={"capacity": slots * (spec.nbytes + 4096)}, deadline="150ms", queue="1MiB")
    late, other = make_key(4, seed=1), make_key(slots, seed=2)
    blocks, others = blocks_of(spec, 4, seed=1), blocks_of(spec, slots, seed=2)
    stored(cache, late, blocks)
    placed = threading.Event()
    place_one = medium.read_one

    def read_one(i: int, name: bytes, place: Place, done: Callable[[int], None]) -> ReadStatus:
        placed.set()
        return place_one(i, name, place, done)

    medium.read_one = read_one  # type: ignore[method-assign]
    first_looks = medium.exists_many
    medium.exists_many = lambda names, call: MemoryBackend.exists_many(medium, names, call)  # type: ignore[method-assign]
    medium.gate.clear()
    assert cache.get(late, torch.zeros_like(blocks)) == 0
    medium.exists_many = first_looks  # type: ignore[method-assign]
    assert placed.is_set()

    accepted = cache.put(other, others)  # wants every slot, and must not get those of the hanging read
    assert accepted == slots - 4
    medium.gate.set()

    assert wait_for(lambda: cache.stats().tiers[0].counters.late == 4)
    with cache.acquire(other[:accepted]) as lease:
        assert all(same_bytes(t, b) for t, b in zip(lease.tensors, others, strict=False))
    out = torch.zeros_like(blocks)
    assert cache.get(late, out) == 4
    assert same_bytes(out, blocks)


def _two(open_double: OpenDouble, deadline: str = "400ms") -> tuple[Hanging, KVCache]:
    """A cache with a tier that can hang, and one of plain memory behind it."""
    hanging = Hanging()
    return hanging, open_double(lambda: hanging, MemoryBackend, deadline=deadline)


def _read(cache: KVCache, key: KVCacheKey, spec: BlockSpec) -> tuple[int, float]:
    started = time.monotonic()
    out = torch.zeros((len(key), *spec.shape), dtype=torch.bfloat16)
    return cache.get(key, out), time.monotonic() - started


def test_a_hanging_tier_delays_others_by_its_deadline_and_once_suspended_not_at_all(
    open_double: OpenDouble, spec: BlockSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.3)
    hanging, cache = _two(open_double)
    key, blocks = key_of("tokens", 6), blocks_of(spec, 6)
    stored(cache, key, blocks)
    hanging.gate.clear()

    waits = [_read(cache, key, spec) for _ in range(breaker.FAILURES_TO_OPEN)]
    assert [got for got, _ in waits] == [6] * breaker.FAILURES_TO_OPEN, "the tier behind is not affected"
    assert all(0.39 < took < 0.4 + SOON_S for _, took in waits)

    ends = time.monotonic() + 1.0  # probes are due meanwhile, for which nobody waits
    while time.monotonic() < ends:
        for call in (lambda: _read(cache, key, spec), lambda: cache.lookup(key), lambda: cache.contains_each(key)):
            started = time.monotonic()
            call()
            assert time.monotonic() - started < SOON_S
    assert cache.health().tiers[cache.config.l2[0].name].state == "down"
    assert cache.health().tiers[cache.config.l2[1].name].state == "ok"

    hanging.gate.set()
    assert wait_for(lambda: cache.lookup(key).by_tier[cache.config.l2[0].name] == 6), "asking is enough to recover"
    assert cache.health().state == "ok"
    assert _read(cache, key, spec)[0] == 6
    assert cache.stats().tiers[0].counters.hits == 6


def test_a_tier_that_uses_up_the_time_leaves_some_for_the_next(open_double: OpenDouble, spec: BlockSpec) -> None:
    hanging, cache = _two(open_double, deadline="5s")  # as long as the whole call
    key, blocks = key_of("tokens", 3), blocks_of(spec, 3)
    stored(cache, key, blocks)
    assert cache._state is not None
    object.__setattr__(cache._state.stack.config.defaults, "deadline", 0.6)
    hanging.gate.clear()

    reads: list[Callable[[], int]] = [lambda: _read(cache, key, spec)[0], lambda: cache.lookup(key).blocks]
    for read in reads:
        started = time.monotonic()
        assert read() == 3
        assert time.monotonic() - started < 0.6 + SOON_S
    hanging.gate.set()


def test_one_probe_at_a_time_tries_a_suspended_tier(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.05)
    medium = Misbehaving()
    cache = open_double(lambda: medium, deadline="10s")
    key, blocks = make_key(6), blocks_of(spec, 6)
    stored(cache, key, blocks)

    def fail(*_: Any) -> Any:
        raise BackendUnavailableError("down")

    medium.act = fail
    for _ in range(breaker.FAILURES_TO_OPEN):
        assert _read(cache, key, spec)[0] == 0
    gate, under_way, most = threading.Event(), [0], [0]

    def count(names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call) -> list[ReadStatus]:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        gate.wait(10)
        under_way[0] -= 1
        return medium.well(names, place, done)

    medium.act = count
    assert wait_for(lambda: bool(_read(cache, key, spec)[1]) and most[0] == 1)
    threads = [threading.Thread(target=_read, args=(cache, key, spec)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == [1]
    gate.set()

    assert wait_for(lambda: _read(cache, key, spec)[0] == 6)
    assert cache.health().state == "ok"


def test_notes_of_uses_never_stand_before_a_read(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    class SlowTouch(doubles.PooledBackend):
        gate = threading.Event()

        def touch_many(self, names: Sequence[bytes]) -> None:
            self.gate.wait(30)

    medium = SlowTouch()
    cache = open_double(lambda: medium, workers=1, deadline="5s")
    key, blocks = make_key(3), blocks_of(spec, 3)
    stored(cache, key, blocks)

    for _ in range(100):  # each leaves a note behind
        got, took = _read(cache, key, spec)
        assert got == 3
        assert took < 1.0

    assert cache._state is not None
    assert cache._state.stack.tiers[0].tier._notes.waiting <= 64, "what a slow medium owes is bounded"
    medium.gate.set()


def test_many_readers_of_one_small_l1_get_their_own_bytes(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    cache = open_double(doubles.ParallelBackend, l1={"capacity": "2MiB"}, codec="planes", queue="16MiB")
    n = 50
    gauss = torch.randn((n, *spec.shape), generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    key = make_key(n)
    for first in range(0, n, 10):
        stored(cache, key[first : first + 10], gauss[first : first + 10])
    wrong: list[str] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(12):
            a = int(rng.integers(0, n - 1))
            b = int(rng.integers(a + 1, n + 1))
            out = torch.zeros_like(gauss[a:b])
            if rng.integers(2):
                got = cache.get(key[a:b], out)
            else:
                got = sum(s is BlockStatus.DELIVERED for s in cache.get_each(key[a:b], out))
            if got != b - a or not same_bytes(out, gauss[a:b]):
                wrong.append(f"{a}:{b} gave {got}")

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert wrong == []
    assert wait_for(lambda: free_slots(l1_of(cache)) == l1_of(cache).pool.n_slots)
    counters = cache.stats().tiers[0].counters
    assert counters.lookups == counters.hits + counters.misses


def test_a_silent_tier_is_asked_once_in_a_call(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    above, hanging = MemoryBackend(), Hanging()
    cache = open_double(lambda: above, lambda: hanging, MemoryBackend, deadline="400ms")
    key, blocks = make_key(9), blocks_of(spec, 9)
    stored(cache, key, blocks)
    for i in (2, 6):  # so that it takes several rounds
        del above._records[next(n for n in above._records if n.endswith(key[i]))]
    hanging.gate.clear()

    reads: list[Callable[[], int]] = [lambda: cache.lookup(key).blocks, lambda: _read(cache, key, spec)[0]]
    for read in reads:
        started = time.monotonic()
        assert read() == 9
        assert time.monotonic() - started < 0.4 + SOON_S
    hanging.gate.set()


def test_chunks_that_hang_behind_a_hanging_one_do_not_use_up_the_threads(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_CHUNK_BYTES", spec.nbytes)
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.05)
    medium = Misbehaving()
    cache = open_double(lambda: medium, deadline="100ms", workers=3)
    key, blocks = make_key(8), blocks_of(spec, 8)
    stored(cache, key, blocks)
    gate = threading.Event()

    def hang(names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call) -> list[ReadStatus]:
        gate.wait(60)
        return [ReadStatus.ABSENT] * len(names)

    medium.act = hang
    assert _read(cache, key, spec)[0] == 0
    medium.act = None  # what hangs goes on hanging, new calls work

    assert wait_for(lambda: _read(cache, key, spec)[0] == 8)
    gate.set()


def test_uses_that_wait_when_the_cache_closes_do_not_reach_a_closed_medium(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    gate, began = threading.Event(), threading.Event()

    class TouchesSlowly(doubles.PooledBackend):
        def touch_many(self, names: Sequence[bytes]) -> None:
            del names
            began.set()
            gate.wait(30)

    cache = open_double(TouchesSlowly)
    key, blocks = make_key(3), blocks_of(spec, 3)
    cache.put(key, blocks)
    cache.flush(10)
    for _ in range(3):
        assert cache.get(key, torch.zeros_like(blocks)) == 3
    assert began.wait(10)

    assert cache._state is not None
    tier = cache._state.stack.tiers[0].tier
    cache.close()
    gate.set()

    assert wait_for(lambda: not tier._notes._threads)
    assert (tier.counters.snapshot().io_errors, tier.last_error) == (0, "")
