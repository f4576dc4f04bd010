"""A tier with ``admit = "evicted"`` gets blocks when they are about to leave L1, and not before."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, ConfigError, KVCache, Namespace
from kvstore.backend import PutItem
from kvstore.types import Call, PutStatus
from tests import doubles
from tests.support import MakeKey, blocks_of, key_of, same_bytes
from tests.unit.cache.stacks import Layers, open_layers, slots

Open = Callable[..., Layers]


class GatedCounting(doubles.CountingBackend):
    """Stores only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        self.gate.wait(30)
        return super().put_many(items, Call.within(30))


@pytest.fixture
def gated() -> Iterator[GatedCounting]:
    backend = GatedCounting()
    yield backend
    backend.gate.set()


@pytest.fixture
def demoting(spec: BlockSpec, request: pytest.FixtureRequest) -> Open:
    """Opens an L1 of some slots over a tier for evicted blocks (``below``) and any others."""

    def make(
        n_slots: int, below: Any = None, *, queue_blocks: int = 1000, policy: str = "prefix-lru", **other: Any
    ) -> Layers:
        backend = doubles.CountingBackend() if below is None else below
        settings = {"admit": "evicted", "queue": queue_blocks * spec.nbytes}
        l1 = slots(spec, n_slots) | {"policy": policy}
        opened = open_layers(spec, l1, {"below": (backend, settings), **other})
        request.addfinalizer(opened.cache.close)
        return opened

    return make


def test_blocks_are_written_when_they_leave_and_not_before(demoting: Open, spec: BlockSpec, make_key: MakeKey) -> None:
    stack = demoting(64)
    first, blocks = make_key(20), blocks_of(spec, 20)
    stack.cache.put(first, blocks)
    stack.cache.flush(10)
    assert stack.backends["below"].put_names == []

    for seed in range(1, 4):
        stack.cache.put(make_key(20, seed=seed), blocks_of(spec, 20, seed=seed))
        stack.cache.flush(10)

    assert stack.counters("below").lost_from_l1 == 0
    assert stack.l1.leading(first.digests) + stack.leads("below", first) >= 20
    out = torch.zeros_like(blocks)
    assert stack.cache.get(first, out) == 20
    assert same_bytes(out, blocks)


def test_nothing_is_lost_while_the_tier_keeps_up(demoting: Open, spec: BlockSpec) -> None:
    stack = demoting(32)
    keys = [key_of("tokens", 7, seed=seed) for seed in range(30)]
    for seed, key in enumerate(keys):
        assert stack.cache.put(key, blocks_of(spec, 7, seed=seed)) == 7
        assert stack.cache.lookup(key).blocks == 7
        stack.cache.flush(10)

    assert stack.counters("below").lost_from_l1 == 0
    assert stack.l1.counters.evictions >= 30 * 7 - 32
    for seed, key in enumerate(keys):
        out = torch.zeros_like(blocks_of(spec, 7))
        assert stack.cache.get(key, out) == 7
        assert same_bytes(out, blocks_of(spec, 7, seed=seed))
    assert len(set(stack.backends["below"].put_names)) == len(stack.backends["below"].put_names)


def test_some_slots_are_kept_clean_ahead_of_need(demoting: Open, spec: BlockSpec, gated: GatedCounting) -> None:
    gated.gate.set()
    stack = demoting(64, gated)
    for seed in range(4):
        stack.cache.put(key_of("tokens", 16, seed=seed), blocks_of(spec, 16, seed=seed))
    stack.cache.put(key_of("tokens", 16, seed=4), blocks_of(spec, 16, seed=4))
    stack.cache.flush(10)
    gated.gate.clear()  # from here on nothing can be saved in time

    stack.cache.put(key_of("tokens", 4, seed=5), blocks_of(spec, 4, seed=5))

    assert stack.counters("below").lost_from_l1 == 0


def test_a_full_queue_loses_blocks_and_counts_them(demoting: Open, spec: BlockSpec, gated: GatedCounting) -> None:
    stack = demoting(32, gated, queue_blocks=6)
    for seed in range(6):
        key, blocks = key_of("tokens", 16, seed=seed), blocks_of(spec, 16, seed=seed)
        assert stack.cache.put(key, blocks) == 16  # nobody waits for the medium

    counters = stack.counters("below")
    assert counters.lost_from_l1 == stack.l1.counters.evictions > 0
    assert stack.cache.stats().tiers[0].queued_bytes == 6 * spec.nbytes
    gated.gate.set()
    stack.cache.flush(10)
    assert len(gated.put_names) == 6
    assert stack.l1.counters.pinned_blocks == 0


def test_a_block_that_the_tier_delivered_is_not_written_back(demoting: Open, spec: BlockSpec) -> None:
    stack = demoting(16)
    keys = [key_of("tokens", 8, seed=seed) for seed in range(4)]
    for seed, key in enumerate(keys):
        stack.cache.put(key, blocks_of(spec, 8, seed=seed))
        stack.cache.flush(10)
    for _ in range(3):
        for key in keys:
            with stack.cache.acquire(key) as lease:
                assert lease.blocks == 8
            stack.cache.flush(10)

    names = stack.backends["below"].put_names
    assert len(names) == len(set(names)) == 32


def test_what_a_slower_tier_delivered_is_saved_when_it_leaves(demoting: Open, spec: BlockSpec) -> None:
    other = (doubles.PooledBackend(), {"admit": "all", "queue": 100 * spec.nbytes})
    stack = demoting(16, slow=other)
    keys = [key_of("tokens", 8, seed=seed) for seed in range(3)]
    for seed, key in enumerate(keys):
        stack.cache.put(key, blocks_of(spec, 8, seed=seed))
        stack.cache.flush(10)
    stack.drop("below", [digest for key in keys for digest in key.digests])
    stack.l1.clear()

    for key in (*keys, *keys):
        stack.cache.get(key, torch.zeros_like(blocks_of(spec, 8)))
        stack.cache.flush(10)

    assert stack.leads("below", keys[0]) == 8


def test_order_of_ages_survives_the_way_down(demoting: Open, spec: BlockSpec) -> None:
    stack = demoting(40)
    key = key_of("tokens", 40)
    stack.cache.put(key, blocks_of(spec, 40))
    for seed in range(1, 4):
        stack.cache.put(key_of("tokens", 30, seed=seed), blocks_of(spec, 30, seed=seed))
        stack.cache.flush(10)

    mine = [name[17:] for name in stack.backends["below"]._records if name[17:] in set(key.digests)]
    assert mine == list(key.digests)[::-1]


@pytest.mark.parametrize("policy", ["prefix-lru", "lru", "fifo", "s3fifo"])
def test_every_policy_gives_back_what_was_put(demoting: Open, spec: BlockSpec, policy: str) -> None:
    stack = demoting(24, policy=policy)
    rng = random.Random(7)
    keys = [key_of("tokens", 6, seed=seed) for seed in range(12)]
    for _ in range(60):
        seed = rng.randrange(12)
        blocks = blocks_of(spec, 6, seed=seed)
        out = torch.zeros_like(blocks)
        n = stack.cache.get(keys[seed], out)
        assert same_bytes(out[:n], blocks[:n])
        stack.cache.put(keys[seed], blocks)
        stack.cache.flush(10)
    assert stack.l1.counters.pinned_blocks == 0
    counters = stack.counters("below")
    assert counters.stored > 0
    if policy != "s3fifo":  # whose order of victims is known only when they leave
        assert counters.lost_from_l1 == 0


def test_close_writes_what_only_l1_holds(demoting: Open, spec: BlockSpec) -> None:
    class Kept(doubles.CountingBackend):
        def close(self) -> None:
            self.at_close = dict(self._records)
            super().close()

    backend, slow = Kept(), Kept()
    stack = demoting(64, backend, queue_blocks=5, slow=(slow, {"admit": "hot", "queue": 100 * spec.nbytes}))
    shared, alone = key_of("tokens", 10, seed=1), key_of("tokens", 30, seed=2)
    for _ in range(2):
        stack.cache.put(shared, blocks_of(spec, 10))
        stack.cache.flush(10)
    stack.cache.put(alone, blocks_of(spec, 30))
    assert backend.put_names == []

    stack.cache.close()

    assert {name[17:] for name in backend.at_close} == set(alone.digests)  # the others are held below
    assert {name[17:] for name in slow.at_close} == set(shared.digests)


def test_close_is_bounded_and_counts_what_it_could_not_write(
    demoting: Open, spec: BlockSpec, gated: GatedCounting
) -> None:
    stack = demoting(64, gated, queue_blocks=5)
    tier = stack.stack.tiers[0].tier
    stack.cache.put(key_of("tokens", 30), blocks_of(spec, 30))

    started = time.monotonic()
    stack.cache.close()

    assert time.monotonic() - started < 6
    counters = tier.counters.snapshot()
    assert counters.lost_from_l1 + counters.stores_dropped + 5 >= 30


def test_it_needs_l1(spec: BlockSpec, namespace: Namespace) -> None:
    config = {"l1": {"enabled": False}, "l2": [{"backend": "memory", "admit": "evicted"}]}
    with pytest.raises(ConfigError, match=r"l2\[0\].admit = 'evicted': expected .* l1.enabled is false"):
        KVCache.open(config, spec=spec, namespace=namespace)


def test_many_threads_and_a_tiny_l1_keep_the_books(demoting: Open, spec: BlockSpec) -> None:
    stack = demoting(24, queue_blocks=8)
    failures: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(40):
            seed = rng.randrange(10)
            blocks = blocks_of(spec, 5, seed=seed)
            key = key_of("tokens", 5, seed=seed)
            stack.cache.put(key, blocks)
            out = torch.zeros_like(blocks)
            n = stack.cache.get(key, out)
            if not same_bytes(out[:n], blocks[:n]):
                failures.append(f"wrong bytes for seed {seed}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stack.cache.flush(10)

    assert failures == []
    assert stack.l1.counters.pinned_blocks == 0
