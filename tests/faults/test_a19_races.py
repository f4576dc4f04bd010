"""A19: many threads put, look, get, hold, delete and evict at once, with codecs: no wrong byte, nothing kept."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any, Final

import pytest
import torch

from kvstore import BlockSpec, KVCacheKey
from kvstore.types import BlockStatus, Presence
from tests.faults.conftest import Rounds
from tests.faults.process import Forge
from tests.faults.store import TIER, Store, over
from tests.support_faults import WatchedCache, chain, gauss, rss_bytes, same, target

SPEC: Final = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")  # 256 KiB
CHAINS, LENGTH = 12, 4
THREADS = 16
L1_BLOCKS = CHAINS * LENGTH // 4
CAPACITIES: Final = {"lmdb": "8MiB", "nvme": "64MiB", "tree": "8MiB", "s3": "64MiB"}
"""A quarter of what is put, as far as the medium can be that small."""


class OfTheHolderError(Exception):
    """Raised on purpose by somebody who holds a lease."""


def fail_at_times(rng: random.Random) -> None:
    if rng.random() < 0.01:
        raise OfTheHolderError


class Race:
    """Threads with the same few chains; what is wrong ends up in ``wrong``."""

    def __init__(self, cache: WatchedCache) -> None:
        self.cache = cache
        self.keys = [chain(LENGTH, seed=i, spec=SPEC) for i in range(CHAINS)]
        self.blocks = [gauss(SPEC, range(LENGTH * i, LENGTH * i + LENGTH)) for i in range(CHAINS)]
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()

    def run(self, total: int, seconds: float) -> None:
        """Do about ``total`` calls, for about so long at most."""
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._guard, args=(seed, total // THREADS, end)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"

    def _guard(self, seed: int, count: int, end: float) -> None:
        rng = random.Random(seed)
        calls = [self.put, self.put, self.look, self.get, self.get, self.each, self.hold, self.hold, self.stream]
        try:
            for _ in range(count):
                if time.monotonic() > end:
                    return
                i, start = rng.randrange(CHAINS), rng.randrange(LENGTH)
                rng.choice(calls)(self.keys[i][start:], self.blocks[i][start:], rng)
                if rng.random() < 0.05:
                    self.cache.delete(self.keys[i][: 1 + rng.randrange(LENGTH)])
                self.seen["calls"] += 1
        except BaseException as e:  # noqa: BLE001 - judged by the test
            self.wrong.append(repr(e))

    def judge(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if not same(got.contiguous(), expected):
            self.wrong.append(what)

    def put(self, key: KVCacheKey, blocks: torch.Tensor, rng: random.Random) -> None:
        mine = blocks.clone()
        self.cache.put(key, mine)
        mine.view(torch.uint8).fill_(rng.randrange(256))

    def look(self, key: KVCacheKey, blocks: torch.Tensor, rng: random.Random) -> None:
        promised = self.cache.contains_each(key)
        out = target(SPEC, len(key))
        statuses = self.cache.get_each(key, out)
        for i, (presence, status) in enumerate(zip(promised, statuses, strict=True)):
            if status is BlockStatus.DELIVERED:
                self.judge("look", out[i], blocks[i])
            elif presence is Presence.PRESENT:
                self.seen["broken promises"] += 1
            if status in {BlockStatus.CORRUPT, BlockStatus.MISMATCH, BlockStatus.UNAVAILABLE}:
                self.wrong.append(str(status))

    def get(self, key: KVCacheKey, blocks: torch.Tensor, rng: random.Random) -> None:
        out = target(SPEC, len(key))
        n = self.cache.get(key, out)
        held = out[:n].clone()
        time.sleep(rng.random() * 0.01)
        self.judge("get", out[:n], blocks[:n])
        self.judge("get, later", held, blocks[:n])
        self.judge("behind the prefix", out[n:], target(SPEC, len(key))[n:])

    def each(self, key: KVCacheKey, blocks: torch.Tensor, rng: random.Random) -> None:
        out = target(SPEC, len(key))
        for i, status in enumerate(self.cache.get_each(key, out)):
            self.judge("each", out[i], blocks[i] if status is BlockStatus.DELIVERED else target(SPEC)[0])

    def hold(self, key: KVCacheKey, blocks: torch.Tensor, rng: random.Random) -> None:
        try:
            with self.cache.acquire(key) as lease:
                time.sleep(rng.random() * 0.05)
                for got, expected in zip(lease.tensors, blocks, strict=False):
                    self.judge("lease", got, expected)
                fail_at_times(rng)
        except OfTheHolderError:
            self.seen["exceptions of holders"] += 1

    def stream(self, key: KVCacheKey, blocks: torch.Tensor, rng: random.Random) -> None:
        groups = list(self.cache.stream(key))
        n = groups[-1].n_blocks if groups else 0
        for group in groups:
            expected = blocks[:n, group.first_layer : group.first_layer + group.n_layers]
            self.judge("stream", group.tensor[:n], expected.contiguous())


def race(store: Store, total: int, seconds: float, codec: str) -> dict[str, Any]:
    """Two races of the same length; says what was wrong and what was left."""
    deadline_s = 20.0  # of a machine on which sixteen threads share two cores with others
    l1 = f"{L1_BLOCKS * (SPEC.nbytes + 4096)}B"
    with store.open(
        spec=SPEC, l1=l1, capacity=CAPACITIES[store.kind], codec=codec, queue="4MiB", deadline=deadline_s
    ) as cache:
        cache.slow.clear()
        race = Race(cache)
        sizes = []
        for _ in range(2):
            race.run(total, seconds)
            cache.flush(60)
            sizes.append(rss_bytes())
        stats = cache.stats()
        counters = cache.tier(TIER).counters
        l1_counters = stats.l1
        assert l1_counters is not None
        bad = counters.corrupt + counters.key_mismatch + counters.spec_mismatch + counters.io_errors
        return {
            "wrong": race.wrong[:10],
            "seen": dict(race.seen),
            "pinned": l1_counters.pinned_blocks,
            "l1": [l1_counters.resident_bytes, l1_counters.resident_blocks * SPEC.nbytes],
            "lookups": [stats.cache.lookups, stats.cache.hits + stats.cache.misses],
            "hits": stats.cache.hits,
            "l1 hits": stats.cache.l1_hits,
            "dropped": l1_counters.leases_dropped,
            "bad": bad,
            "sizes": sizes,
        }


RACE = """
from tests.faults.test_a19_races import race
print(json.dumps(race(STORE, int(ARGS[0]), float(ARGS[1]), ARGS[2])))
"""


@pytest.mark.parametrize("codec", ["planes"])
@over("LNTS")
def test_many_threads_get_right_bytes_and_leave_nothing_pinned(
    store: Store, codec: str, forge: Forge, rounds: Rounds
) -> None:
    report = forge.work(RACE, store, rounds(1200, 100_000), rounds(4, 60), codec)
    assert report["wrong"] == []
    assert report["bad"] == 0, report
    assert report["pinned"] == 0
    assert report["dropped"] == 0
    assert report["l1"][0] == report["l1"][1]
    assert report["lookups"][0] == report["lookups"][1]
    assert 0 < report["l1 hits"] < report["hits"], report  # both L1 and the tier were raced for
    assert report["seen"]["calls"] > 200
    kept = 64 << 20  # what reads keep for reuse; a short race, or one on a busy machine, gets there in its second half
    assert report["sizes"][1] <= report["sizes"][0] * 1.05 + kept, report
