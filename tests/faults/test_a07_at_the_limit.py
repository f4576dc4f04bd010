"""A07: LMDB far beyond its capacity, with variable lengths and readers that hold on: it neither fails nor grows."""

from __future__ import annotations

import itertools
import threading
import time

import torch

from kvstore import BlockSpec
from tests.faults.conftest import Rounds
from tests.faults.store import MIB, TIER, Store, over
from tests.support_faults import WatchedCache, noise, same, unrelated

SPEC = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")  # 256 KiB
CAPACITY = 64 * MIB
THREADS = 4


def block(i: int) -> torch.Tensor:
    """Noise in front, zeros behind, so that a codec stores between 60 and 260 KB."""
    made = noise(SPEC, [i]).view(torch.uint8).view(-1).clone()
    made[60_000 + (i * 7919) % 196_000 :] = 0
    return made.view(SPEC.torch_dtype()).view(1, *SPEC.shape)


class Load:
    """Threads that put, one that holds on to what it got, and one that watches the file."""

    def __init__(self, store: Store, cache: WatchedCache, total: int) -> None:
        self.store = store
        self.cache = cache
        self.total = total
        self.numbers = itertools.count()
        self.done: list[int] = []
        self.seconds: list[float] = []
        self.longest = 0
        self.errors: list[BaseException] = []
        self.over = threading.Event()

    def run(self) -> None:
        writers = [threading.Thread(target=self._guard, args=(self._write,)) for _ in range(THREADS)]
        others = [threading.Thread(target=self._guard, args=(what,)) for what in (self._hold, self._watch)]
        for thread in writers + others:
            thread.start()
        for thread in writers:
            thread.join()
        self.over.set()
        for thread in others:
            thread.join()

    def _guard(self, what: object) -> None:
        try:
            what()  # type: ignore[operator]
        except BaseException as e:  # noqa: BLE001 - judged by the test
            self.errors.append(e)

    def _write(self) -> None:
        while (i := next(self.numbers)) < self.total:
            data = block(i)
            start = time.monotonic()
            self.cache.put(unrelated(i, SPEC), data)
            self.cache.flush(60)
            self.seconds.append(time.monotonic() - start)
            self.done.append(i)

    def _hold(self) -> None:
        while not self.over.wait(0.01):
            if self.done:
                i = self.done[-1]
                found = self.cache.fetch(unrelated(i, SPEC))
                self.over.wait(0.1)
                assert found is None or same(found, block(i))

    def _watch(self) -> None:
        while not self.over.wait(0.01):
            self.longest = max(self.longest, (self.store.root / "data.mdb").stat().st_size)


@over("L")
def test_churn_far_beyond_the_capacity_neither_fails_nor_grows(store: Store, rounds: Rounds) -> None:
    total = rounds(1200, 5000)
    with store.open(spec=SPEC, capacity=CAPACITY, codec="zstd", queue="16MiB") as cache:
        load = Load(store, cache, total)
        load.run()
        assert not load.errors, load.errors
        tier = cache.tier(TIER)
        assert tier.counters.refused_medium + tier.counters.refused_queue_full <= total // 1000
        assert tier.counters.evicted > 0
        assert load.longest <= CAPACITY * 5 // 4 + MIB
        assert tier.payload_bytes <= CAPACITY
        newest_exact(cache, load.done)
        seconds = sorted(load.seconds)
        p50, p99 = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
        assert p99 <= max(20 * p50, 0.05), (p50, p99)
        cache.clear()
        assert cache.fetch(unrelated(load.done[-1], SPEC)) is None
        cache.store(unrelated(total, SPEC), block(total))
        found = cache.fetch(unrelated(total, SPEC))
        assert found is not None
        assert same(found, block(total))


def newest_exact(cache: WatchedCache, done: list[int]) -> None:
    """The newest half of the capacity is there."""
    nbytes = 0
    for i in reversed(done):
        nbytes += 60_000 + (i * 7919) % 196_000
        if nbytes > CAPACITY // 2:
            return
        found = cache.fetch(unrelated(i, SPEC))
        assert found is not None, i
        assert same(found, block(i)), i
    raise AssertionError("fewer blocks than half of the capacity were put")
