"""One process of the soak: many threads on a cache of all tiers, every byte looked at, every call timed."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from kvstore import KVCache, KVCacheKey, Lease
from tests.faults import exact
from tests.faults.store import Store
from tests.support_faults import (
    NAMESPACE,
    SMALL,
    UNTOUCHED,
    Residue,
    WatchedCache,
    chain,
    left_behind,
    noise,
    rss_bytes,
)
from tests.support_s3 import CREDENTIALS

CHAINS, LENGTH, THREADS = 24, 6, 16
HANGS_S: Final = 60.0
"""A call that takes so long hangs: three tiers of one second each, on a machine that is busy with all this."""


def config(root: Path, url: str, bucket: str) -> dict[str, Any]:
    """Less room in each tier than the chains take, so that all of them move and evict; S3 holds everything."""
    common = {"codec": "none", "admit": "all", "deadline": 1.0}
    server = {"bucket": bucket, "endpoint_url": url, **CREDENTIALS}
    return {
        "l1": {"capacity": "1MiB"},
        "l2": [
            {**common, "name": "lmdb", "backend": "lmdb", "path": str(root / "lmdb"), "capacity": "2MiB"},
            {**common, "name": "nvme", "backend": "nvme", "path": str(root / "nvme"), "capacity": "4MiB"},
            {**common, "name": "s3", "backend": "s3", **server, "capacity": "64MiB"},
        ],
    }


class Soak:
    """Threads with the same few chains; what is wrong ends up in ``wrong``."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.watched = WatchedCache(cache, HANGS_S)  # times nothing here: only what it wraps is used
        self.seed = seed
        self.keys = [chain(LENGTH, seed=i) for i in range(CHAINS)]
        self.blocks = [noise(SMALL, range(LENGTH * i, LENGTH * i + LENGTH)) for i in range(CHAINS)]
        self.raw = [blocks.view(torch.uint8).numpy().reshape(LENGTH, -1) for blocks in self.blocks]
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self.longest_s: dict[str, float] = {}
        self.began: dict[int, tuple[str, float]] = {}
        self.over = threading.Event()

    def run(self, seconds: float) -> list[int]:
        """Let all threads work for so long; returns what the process took of memory, second by second."""
        threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        sizes = []
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.wrong:
            self.over.wait(min(1.0, seconds / 10))
            sizes.append(rss_bytes())
            self._watch()
        self.over.set()
        deadline = time.monotonic() + HANGS_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self.wrong.append(f"calls that never ended: {list(self.began.values())}")
        return sizes

    def _watch(self) -> None:
        now = time.monotonic()
        self.wrong += [f"{what} hangs" for what, began in list(self.began.values()) if now - began > HANGS_S]

    def _work(self, n: int) -> None:
        rng = random.Random(100 * self.seed + n)
        calls: dict[Callable[[int, int, random.Random], None], int] = {
            self.put: 26, self.get: 20, self.each: 14, self.hold: 12, self.stream: 8, self.look: 8, self.prefetch: 6,
            self.delete: 5,
        }  # fmt: skip
        try:
            while not self.over.is_set():
                call = rng.choices(list(calls), list(calls.values()))[0]
                i, start = rng.randrange(CHAINS), rng.randrange(LENGTH)
                self._timed(n, call, i, start, rng)
                if n == 0 and rng.random() < 0.002:
                    self._timed(n, self.clear, i, start, rng)
        except Exception as e:  # noqa: BLE001 - judged by the test
            self.wrong.append(repr(e))

    def _timed(self, n: int, call: Callable[[int, int, random.Random], None], i: int, start: int, rng: Any) -> None:
        began = time.monotonic()
        self.began[n] = (call.__name__, began)
        call(i, start, rng)
        del self.began[n]
        took_s = time.monotonic() - began
        self.done[call.__name__] += 1
        self.longest_s[call.__name__] = max(took_s, self.longest_s.get(call.__name__, 0.0))

    def judge(self, what: str, got: torch.Tensor, i: int, block: int) -> None:
        if not np.array_equal(got.contiguous().view(torch.uint8).numpy().reshape(-1), self.raw[i][block]):
            self.wrong.append(f"{what}: block {block} of chain {i} has wrong bytes")

    def key(self, i: int, start: int) -> KVCacheKey:
        return self.keys[i][start:]

    # -- calls

    def put(self, i: int, start: int, rng: random.Random) -> None:
        mine = self.blocks[i][start:].clone()
        self.cache.put(self.key(i, start), mine)
        mine.view(torch.uint8).numpy().fill(rng.randrange(256))  # the caller's memory is the caller's again

    def get(self, i: int, start: int, rng: random.Random) -> None:
        raw = np.full((LENGTH - start, SMALL.nbytes), UNTOUCHED, np.uint8)
        out = torch.from_numpy(raw).view(torch.bfloat16).view(LENGTH - start, *SMALL.shape)
        n = self.cache.get(self.key(i, start), out)
        time.sleep(rng.random() * 0.005)  # nobody writes there later
        if not (np.array_equal(raw[:n], self.raw[i][start : start + n]) and (raw[n:] == UNTOUCHED).all()):
            self.wrong.append(f"get: chain {i} from {start} has wrong bytes, {n} blocks were delivered")

    def each(self, i: int, start: int, rng: random.Random) -> None:
        exact.delivered(self.watched, self.key(i, start), self.blocks[i][start:])

    def hold(self, i: int, start: int, rng: random.Random) -> None:
        with self.cache.acquire(self.key(i, start)) as lease:
            time.sleep(rng.random() * 0.02)
            self._judge_lease(lease, i, start)

    def _judge_lease(self, lease: Lease, i: int, start: int) -> None:
        for n, got in enumerate(lease.tensors):
            self.judge("acquire", got, i, start + n)

    def stream(self, i: int, start: int, rng: random.Random) -> None:
        groups = list(self.cache.stream(self.key(i, start)))
        n = groups[-1].n_blocks if groups else 0
        for group in groups:
            layers = slice(group.first_layer, group.first_layer + group.n_layers)
            expected = self.blocks[i][start : start + n, layers].contiguous().view(torch.uint8).numpy()
            if not np.array_equal(group.tensor[:n].contiguous().view(torch.uint8).numpy(), expected):
                self.wrong.append(f"stream: chain {i} from {start} has wrong bytes in layers {layers}")

    def look(self, i: int, start: int, rng: random.Random) -> None:
        assert 0 <= self.cache.lookup(self.key(i, start)).blocks <= LENGTH - start
        assert len(self.cache.contains_each(self.key(i, start))) == LENGTH - start

    def prefetch(self, i: int, start: int, rng: random.Random) -> None:
        future = self.cache.prefetch(self.key(i, start))
        if rng.random() < 0.3:
            future.cancel()

    def delete(self, i: int, start: int, rng: random.Random) -> None:
        self.cache.delete(self.key(i, start))

    def clear(self, i: int, start: int, rng: random.Random) -> None:
        self.cache.clear()


def live(store: Store, url: str, bucket: str, seed: str, seconds: str) -> None:
    """Soak, wait until the faults are over, then give everything back."""
    before = Residue.now()
    cache = KVCache.open(config(store.root, url, bucket), spec=SMALL, namespace=NAMESPACE)
    print("ready", flush=True)
    sys.stdin.readline()
    soak = Soak(cache, int(seed))
    sizes = soak.run(float(seconds))
    print("quiet", flush=True)
    sys.stdin.readline()
    cache.flush(HANGS_S)
    report = _settled(cache)
    began = time.monotonic()
    cache.close()
    report |= {
        "wrong": soak.wrong[:10],
        "done": dict(soak.done),
        "longest": {name: round(took_s, 2) for name, took_s in soak.longest_s.items()},
        "sizes": sizes,
        "close_s": time.monotonic() - began,
        "left": left_behind(before),
    }
    print(json.dumps(report))


def _settled(cache: KVCache) -> dict[str, Any]:
    """What must hold once nothing is under way: prefetches and late reads may still be."""
    deadline = time.monotonic() + HANGS_S
    while (pinned := _pinned(cache)) and time.monotonic() < deadline:
        time.sleep(0.05)
    stats = cache.stats()
    asked: dict[str, Any] = {"cache": stats.cache, **{tier.name: tier.counters for tier in stats.tiers}}
    return {
        "pinned": pinned,
        "lookups": {name: [c.lookups, c.hits + c.misses] for name, c in asked.items()},
        "hits": {name: c.hits for name, c in asked.items()},
        "tiers": {tier.name: dataclasses.asdict(tier.counters) for tier in stats.tiers},
    }


def _pinned(cache: KVCache) -> int:
    l1 = cache.stats().l1
    assert l1 is not None
    return l1.pinned_blocks
