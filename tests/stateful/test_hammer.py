"""Many threads on one small cache: every byte delivered is right, and everything is given back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvstore import BlockSpec, ClosedError, KVCache, KVCacheKey, Namespace
from tests.support import KEY_KINDS, blocks_of, key_of, same_bytes

SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
CHAINS, LENGTH, THREADS, SECONDS = 12, 10, 8, 6.0


class Hammer:
    """Random calls of one thread; what is wrong ends up in ``wrong``."""

    def __init__(self, cache: KVCache, seed: int, wrong: list[str]) -> None:
        self.cache = cache
        self.rng = random.Random(seed)
        self.wrong = wrong
        self.done = 0

    def run(self, until: float) -> None:
        calls: list[Callable[[KVCacheKey, torch.Tensor], None]] = [self.put, self.get, self.get, self.each, self.lease]
        try:
            while time.monotonic() < until:
                chain = self.rng.randrange(CHAINS)
                start = self.rng.randrange(LENGTH)
                key = KEYS[chain][start:]
                self.rng.choice(calls)(key, BLOCKS[chain][start:])
                if self.rng.random() < 0.03:
                    self.cache.delete(key[:2])
                if self.rng.random() < 0.002:
                    self.cache.clear()
                self.done += 1
        except Exception as e:  # noqa: BLE001 - reported by the main thread
            self.wrong.append(repr(e))

    def put(self, key: KVCacheKey, blocks: torch.Tensor) -> None:
        mine = blocks.clone()
        self.cache.put(key, mine)
        mine.fill_(7)

    def get(self, key: KVCacheKey, blocks: torch.Tensor) -> None:
        out = torch.full_like(blocks, 7.0)
        got = self.cache.get(key, out)
        if not (same_bytes(out[:got], blocks[:got]) and same_bytes(out[got:], torch.full_like(blocks[got:], 7.0))):
            self.wrong.append("get")

    def each(self, key: KVCacheKey, blocks: torch.Tensor) -> None:
        out = torch.full_like(blocks, 7.0)
        for i, status in enumerate(self.cache.get_each(key, out)):
            expected = blocks[i] if status.value == "delivered" else torch.full_like(blocks[i], 7.0)
            if not same_bytes(out[i], expected):
                self.wrong.append(f"get_each {status}")

    def lease(self, key: KVCacheKey, blocks: torch.Tensor) -> None:
        lease = self.cache.acquire(key)
        tensors = lease.tensors
        time.sleep(self.rng.random() * 0.01)
        if not all(same_bytes(t, b) for t, b in zip(tensors, blocks, strict=False)):
            self.wrong.append("lease")
        del tensors
        if self.rng.random() < 0.7:
            lease.release()


KEYS = [key_of(KEY_KINDS[i % 2], LENGTH, seed=i) for i in range(CHAINS)]
BLOCKS = [blocks_of(SPEC, LENGTH, seed=i) for i in range(CHAINS)]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "planes"])
def test_nothing_is_wrong_and_nothing_is_left_when_threads_race(tmp_path: Path, codec: str) -> None:
    block = SPEC.nbytes + 4096
    config = {
        "l1": {"capacity": 40 * block},  # a third of the working set
        "l2": [{"backend": "lmdb", "path": str(tmp_path), "capacity": 60 * block, "codec": codec}],
    }
    wrong: list[str] = []
    with KVCache.open(config, spec=SPEC, namespace=Namespace(model="m", revision="r")) as cache:
        hammers = [Hammer(cache, seed, wrong) for seed in range(THREADS)]
        until = time.monotonic() + SECONDS
        threads = [threading.Thread(target=hammer.run, args=(until,)) for hammer in hammers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        cache.flush(20)
        stats = cache.stats()

    assert wrong == []
    assert sum(hammer.done for hammer in hammers) > 200
    assert stats.l1 is not None
    assert stats.l1.pinned_blocks == 0
    assert stats.l1.resident_bytes == stats.l1.resident_blocks * SPEC.nbytes
    assert stats.cache.lookups == stats.cache.hits + stats.cache.misses
    tier = stats.tiers[0]
    assert (tier.counters.corrupt, tier.counters.key_mismatch, tier.counters.io_errors) == (0, 0, 0)
    assert tier.queued_bytes == 0
    assert tier.payload_bytes <= tier.capacity_bytes
    with pytest.raises(ClosedError):
        cache.stats()
