"""The process of the crash matrix: it puts, reads, deletes, clears, and says what it was told before it goes on."""

from __future__ import annotations

import functools
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvstore import BlockSpec, KVCacheKey
from tests.faults import exact
from tests.faults.crash_board import Board, Trap
from tests.faults.store import TIER, Store
from tests.support_faults import WatchedCache, chain, noise

SPEC: Final = BlockSpec(layers=8, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")  # 64 KiB
CHAIN_BLOCKS: Final = 4
CHAINS: Final = 48
"""Chains of each writer: 12 MiB."""

UNSTORED: Final = ("refused_queue_full", "refused_medium", "stores_dropped", "io_errors", "timeouts", "lost_from_l1")


def key_of(who: int, i: int) -> KVCacheKey:
    return chain(CHAIN_BLOCKS, seed=1000 * who + i, spec=SPEC)


@functools.lru_cache(4 * CHAINS)
def blocks_of(who: int, i: int) -> torch.Tensor:
    first = CHAIN_BLOCKS * (1000 * who + i)
    return noise(SPEC, range(first, first + CHAIN_BLOCKS))


def delivered(cache: WatchedCache, who: int, i: int) -> list[bool]:
    """Which blocks of a chain are there; each of them must be exact."""
    return exact.delivered(cache, key_of(who, i), blocks_of(who, i))


def backend_of(cache: WatchedCache) -> Any:
    assert cache.cache._state is not None
    return next(iter(cache.cache._state.stack)).tier.backend


@dataclass(frozen=True)
class Job:
    """What a writer is to do.

    Attributes:
        board: Where it counts its phases.
        who: Its number; it uses chains of its own.
        seed: Of its random choices.
        capacity: Of the tier.
        clears: Whether it may clear, which the other writers' blocks would not survive.
        steps: After how many it closes the cache and ends.
        trap: Where it ends otherwise.
    """

    board: str
    who: int
    seed: int
    capacity: str
    clears: bool
    steps: int
    trap: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def live(store: Store, job_text: str) -> None:
    job = Job(**json.loads(job_text))
    board = Board(Path(job.board))
    board.watch(store.kind)
    if job.trap is not None:
        board.arm(Trap(**job.trap))
    with board.phase("open"):
        cache = store.open(spec=SPEC, l1="2MiB", capacity=job.capacity)
    _say(ready=True)
    _Writer(cache, board, job).run()
    with board.phase("close"):
        cache.cache.close()
    _say(closed=True)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class _Writer:
    def __init__(self, cache: WatchedCache, board: Board, job: Job) -> None:
        self.cache, self.board, self.job = cache, board, job
        self.rng = random.Random(job.seed)
        self.backend = backend_of(cache)

    def run(self) -> None:
        steps = {"put": 50, "get": 12, "delete": 8, "tend": 6, "pause": 4, "clear": 3 if self.job.clears else 0}
        if self.job.trap is not None:
            also = {"get": "get", "delete": "delete", "reclaim": "tend", "clear": "clear"}.get(self.job.trap["phase"])
            steps |= {also: 30} if also else {}
            steps |= {"clear": 15} if also == "tend" else {}  # which gives it something to do
        for step in self.rng.choices(list(steps), list(steps.values()), k=self.job.steps):
            getattr(self, step)()
        self.put(flush=False)  # so that the close has something to write

    def put(self, *, flush: bool = True) -> None:
        chains = self.rng.sample(range(CHAINS), self.rng.randint(1, 3))
        before = self.trouble()
        _say(put=chains)
        with self.board.phase("queue"):
            accepted = [i for i in chains if self.cache.put(*self.key_and_blocks(i)) == CHAIN_BLOCKS]
            if not flush:
                return
            self.cache.flush(60)
        if self.trouble() == before:
            _say(stored=accepted)

    def get(self) -> None:
        delivered(self.cache, self.job.who, self.rng.randrange(CHAINS))

    def delete(self) -> None:
        i = self.rng.randrange(CHAINS)
        before = self.trouble()
        _say(delete=i)
        with self.board.phase("delete"):
            self.cache.delete(key_of(self.job.who, i))
        if self.trouble() == before:
            _say(deleted=i)

    def clear(self) -> None:
        _say(clear=True)
        with self.board.phase("clear"):
            self.cache.clear()
        _say(cleared=True)

    def tend(self) -> None:
        self.backend.maintain()

    def pause(self) -> None:
        time.sleep(self.rng.uniform(0.0, 0.005))  # to be killed while it does nothing

    def trouble(self) -> list[int]:
        """Counters of what was not stored: a cache may refuse, and then it has not promised anything."""
        counters = self.cache.tier(TIER).counters
        return [getattr(counters, name) for name in UNSTORED]

    def key_and_blocks(self, i: int) -> tuple[KVCacheKey, torch.Tensor]:
        return key_of(self.job.who, i), blocks_of(self.job.who, i)
