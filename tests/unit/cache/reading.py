"""What the tests of the read paths need from a cache's inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvstore import KVCache, KVCacheKey
from kvstore.backend import Place
from kvstore.l1.cache import L1Cache
from kvstore.served import Served
from kvstore.types import Call, ReadStatus
from tests import doubles


def l1_of(cache: KVCache) -> L1Cache:
    assert cache._state is not None
    assert cache._state.stack.l1 is not None
    return cache._state.stack.l1


def free_slots(l1: L1Cache) -> int:
    """Slots that can be had right now."""
    slots = l1.reserve(l1.pool.n_slots, at_any_cost=False)
    l1.release_slots(slots)
    return len(slots)


def stored(cache: KVCache, key: KVCacheKey, blocks: torch.Tensor) -> None:
    """Put blocks, wait, and leave them in the tiers alone."""
    assert cache.put(key, blocks) == len(key)
    cache.flush(20)
    if cache._state is not None and cache._state.stack.l1 is not None:
        cache._state.stack.l1.clear()


def served_by(cache: KVCache, read: Callable[[], Any]) -> Served:
    """What one read says about itself at its end."""
    assert cache._state is not None
    loads = cache._state.loads
    seen: list[Served] = []
    told, loads._on_served = loads._on_served, seen.append
    try:
        read()
    finally:
        loads._on_served = told
    return seen[0]


Act = Callable[[Sequence[bytes], Place, Callable[[int], None], Call], Any]


class Misbehaving(doubles.ParallelBackend):
    """Reads well, or as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Act | None = None

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        if self.act is None:
            return super().read_many(names, place, done, call)
        answer: list[ReadStatus] = self.act(names, place, done, call)
        return answer

    def well(self, names: Sequence[bytes], place: Place, done: Callable[[int], None]) -> list[ReadStatus]:
        """Read in this thread."""
        return [self.read_one(i, name, place, done) for i, name in enumerate(names)]
