"""A04: a writer that is killed at any moment loses nothing it was told is stored, and leaves nothing behind."""

from __future__ import annotations

import functools
import random
import signal
import time
from collections.abc import Sequence

import torch

from tests.faults.conftest import Rounds
from tests.faults.process import Forge
from tests.faults.store import MIB, TIER, Store, over
from tests.support_faults import LARGE, WatchedCache, noise, same, unrelated

CAPACITY = 64 * MIB
WRITER = """
with STORE.open(spec=LARGE) as cache:
    i = int(ARGS[0])
    print("ready", flush=True)
    while True:
        cache.put(unrelated(i), noise(LARGE, [i]))
        cache.flush(60)
        print(i, flush=True)
        i += 1
"""


def write_until_killed(forge: Forge, store: Store, first: int, delay_s: float) -> int:
    """Kill a writer that starts at block ``first``; returns the last block it was told is stored."""
    with forge.start(WRITER, store, first) as writer:
        assert writer.line() == "ready"
        time.sleep(delay_s)
        writer.kill()
        said = [int(line) for line in writer.lines()]
        assert writer.exit_code == -signal.SIGKILL
    return max([first - 1, *said])


@functools.lru_cache(128)
def block(i: int) -> torch.Tensor:
    return noise(LARGE, [i])


def exact_ones(cache: WatchedCache, ids: Sequence[int]) -> set[int]:
    """Blocks that are there; every one of them must be exact."""
    there = set()
    for i in ids:
        found = cache.fetch(unrelated(i))
        if found is not None:
            assert same(found, block(i)), i
            there.add(i)
    return there


@over("LNTS")
def test_kill_9_loses_nothing_acknowledged_and_leaves_nothing_behind(
    store: Store, forge: Forge, rounds: Rounds
) -> None:
    rng = random.Random(4)
    acknowledged: list[int] = []
    with store.open(spec=LARGE):
        pass
    for round_ in range(rounds(5, 30)):
        first = 1000 * round_
        last = write_until_killed(forge, store, first, rng.uniform(0.05, 0.8))
        fresh = range(first, last + 1)
        acknowledged += fresh
        in_flight = last + 1
        with store.open(spec=LARGE) as cache:
            there = exact_ones(cache, [*acknowledged[-80:], in_flight])
            missing = [i for i in fresh if i not in there]
            if missing:  # evicted: the oldest ones, and only because the medium is full
                assert max(missing) < min(i for i in fresh if i in there), missing
                assert store.evicts, f"round {round_}: {missing} are lost"
                assert cache.tier(TIER).payload_bytes > 0.7 * CAPACITY, f"round {round_}: {missing} are lost"
            cache.store(unrelated(in_flight), block(in_flight))
            assert exact_ones(cache, [in_flight]) == {in_flight}
            deadline = time.monotonic() + 1
            while store.strangers() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert store.strangers() == []
            assert store.used_bytes() <= store.bound(CAPACITY)
