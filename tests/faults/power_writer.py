"""The process whose files lose power: it puts, deletes, clears, and marks in the log what it was told."""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any, Final

import torch

from kvstore import KVCacheKey
from tests.faults.store import TIER, Store
from tests.support_faults import SMALL, WatchedCache, chain, noise

CHAIN_BLOCKS: Final = 3
CHAINS: Final = 20
CAPACITY: Final = "16MiB"  # far more than is put
UNSTORED: Final = ("refused_queue_full", "refused_medium", "stores_dropped", "io_errors", "timeouts")


def key_of(i: int) -> KVCacheKey:
    return chain(CHAIN_BLOCKS, seed=i)


@functools.cache
def blocks_of(i: int) -> torch.Tensor:
    return noise(SMALL, range(CHAIN_BLOCKS * i, CHAIN_BLOCKS * (i + 1)))


class _Log:
    def __init__(self, store: Store, path: str) -> None:
        self._library = ctypes.CDLL(None)
        assert self._library.power_attach(str(store.root).encode(), path.encode()) == 0

    def mark(self, **what: Any) -> None:
        self._library.power_mark(json.dumps(what).encode())


def live(store: Store, log_path: str, durability: str) -> None:
    """Two lives of a cache: one that ends well, and one that is still open when the log ends."""
    log = _Log(store, log_path)
    for life in range(2):
        cache = store.open(capacity=CAPACITY, durability=durability)
        log.mark(opened=life)
        first = life * CHAINS // 2
        for i in range(first, first + CHAINS // 2):
            put(cache, log, i)
            if i % 4 == 3:
                log.mark(deleting=i - 1)
                cache.delete(key_of(i - 1))
                log.mark(deleted=i - 1)
        if life == 0:
            log.mark(closing=True)
            cache.cache.close()
            log.mark(closed=True)
            continue
        log.mark(clearing=True)
        cache.clear()
        log.mark(cleared=True)
        for i in range(3):
            put(cache, log, CHAINS + i)
        cache.cache.close()
    print(json.dumps("over"))


def put(cache: WatchedCache, log: _Log, i: int) -> None:
    counters = cache.tier(TIER).counters
    before = [getattr(counters, name) for name in UNSTORED]
    log.mark(putting=i)
    assert cache.put(key_of(i), blocks_of(i)) == CHAIN_BLOCKS
    cache.flush(60)
    counters = cache.tier(TIER).counters
    assert [getattr(counters, name) for name in UNSTORED] == before
    log.mark(stored=i)
