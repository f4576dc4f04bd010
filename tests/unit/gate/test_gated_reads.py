"""A cache never makes a prompt slower than computing it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch

from kvstore import BlockStatus, KVCache, KVCacheKey, Presence
from kvstore import gate as gate_module
from kvstore.types import ReadStatus
from tests.unit.gate.distant import SPEC, DistantBackend, DistantMemory, DistantPacks, Gated, Open

L1 = {"capacity": "1MiB"}
FAST = {"prefill_tokens_per_s": 1e6}  # a block of 16 tokens in 16 us
SLOW = {"prefill_tokens_per_s": 100.0}  # in 160 ms
SLOW_READS = ((1, 0.1), (8, 0.8)) * 4  # 0.1 s a block
N = 8

MEDIA = [DistantBackend, DistantMemory, DistantPacks]


def room(n_blocks: int) -> torch.Tensor:
    return torch.zeros((n_blocks, *SPEC.shape), dtype=SPEC.torch_dtype())


def acquired(cache: KVCache, key: KVCacheKey) -> int:
    with cache.acquire(key) as lease:
        return lease.blocks


def streamed(cache: KVCache, key: KVCacheKey) -> int:
    groups = list(cache.stream(key))
    return groups[-1].n_blocks if groups else 0


READS: dict[str, Callable[[KVCache, KVCacheKey], int]] = {
    "get": lambda cache, key: cache.get(key, room(len(key))),
    "acquire": acquired,
    "prefetch": lambda cache, key: cache.prefetch(key).result(20),
    "stream": streamed,
    "submit_get": lambda cache, key: cache.submit_get(key, room(len(key))).wait(20),
    "submit_get each": lambda cache, key: cache.submit_get(key, room(len(key)), each=True).wait(20),
    "get_each": lambda cache, key: cache.get_each(key, room(len(key))).count(BlockStatus.DELIVERED),
}
PROMISES: dict[str, Callable[[KVCache, KVCacheKey], int]] = {
    "lookup": lambda cache, key: cache.lookup(key).blocks,
    "contains_each": lambda cache, key: cache.contains_each(key).count(Presence.PRESENT),
}


def check_sums(gated: Gated) -> None:
    stats = gated.cache.stats()
    assert stats.cache.lookups == stats.cache.hits + stats.cache.misses
    for tier in stats.tiers:
        assert tier.counters.lookups == tier.counters.hits + tier.counters.misses
        assert tier.counters.gated <= tier.counters.misses


# -- what is declined


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("read", READS)
def test_what_loads_slower_than_it_computes_is_not_loaded(
    open_cache: Open, medium: type[DistantBackend], read: str
) -> None:
    backend = medium()
    gated = open_cache(backend, gate=FAST, l1=L1)
    key = gated.stored(N)
    backend.questions = 0
    gated.learn(0, *SLOW_READS)
    gated.gate._tiers[gated.cache.config.l2[0].name].probed_at = time.monotonic()  # no look in the background
    assert READS[read](gated.cache, key) == 0
    assert backend.reads == []
    assert backend.questions == 0
    assert dataclasses.replace(gated.counters(), stored=0, stored_bytes=0, stored_raw_bytes=0) == dataclasses.replace(
        type(gated.counters())(), lookups=N, misses=N, gated=N
    )
    check_sums(gated)


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("read", READS)
def test_what_loads_faster_is_loaded(open_cache: Open, medium: type[DistantBackend], read: str) -> None:
    gated = open_cache(medium(), gate=SLOW, l1=L1)
    key = gated.stored(N)
    gated.learn(0, *SLOW_READS)  # 0.1 s a block, and 0.16 s to compute it
    assert READS[read](gated.cache, key) == N
    assert gated.counters().gated == 0
    check_sums(gated)


@pytest.mark.parametrize("gate", [{}, FAST | {"enabled": False}], ids=["unknown speed", "disabled"])
@pytest.mark.parametrize("read", READS)
def test_without_a_speed_or_when_disabled_nothing_is_declined(
    open_cache: Open, gate: dict[str, object], read: str
) -> None:
    gated = open_cache(DistantBackend(), gate=gate, l1=L1)
    key = gated.stored(N)
    gated.learn(0, *SLOW_READS)
    assert READS[read](gated.cache, key) == N
    assert gated.counters().gated == 0


@pytest.mark.parametrize("read", READS)
def test_blocks_in_l1_are_always_delivered(open_cache: Open, read: str) -> None:
    gated = open_cache(DistantBackend(), gate=FAST, l1=L1)
    key = gated.stored(N)
    assert acquired(gated.cache, key.prefix(3)) == 3
    gated.learn(0, *SLOW_READS)
    assert READS[read](gated.cache, key) == 3
    assert gated.counters().gated == N - 3
    check_sums(gated)


@pytest.mark.parametrize("read", READS)
def test_the_tier_behind_is_judged_on_its_own(open_cache: Open, read: str) -> None:
    near, far = DistantBackend(), DistantBackend()
    gated = open_cache(near, far, gate={"prefill_tokens_per_s": 1000.0}, l1=L1)
    key = gated.stored(N)
    gated.learn(0, *SLOW_READS)
    assert READS[read](gated.cache, key) == N
    assert (gated.counters(0).gated, gated.counters(0).hits) == (N, 0)
    assert (gated.counters(1).gated, gated.counters(1).hits) == (0, N)
    check_sums(gated)


def test_the_margin_says_how_much_slower_a_load_may_be(open_cache: Open) -> None:
    loads = []
    for margin in (0.6, 0.7):
        gated = open_cache(DistantBackend(), gate=SLOW | {"margin": margin})
        key = gated.stored(N)
        gated.learn(0, *SLOW_READS)  # 0.625 of the time to compute
        loads.append(gated.get(key))
    assert loads == [0, N]


def test_a_long_run_is_worth_a_latency_that_a_short_one_is_not(open_cache: Open) -> None:
    gated = open_cache(DistantBackend(), gate={"prefill_tokens_per_s": 1600.0})  # 10 ms a block
    key = gated.stored(64)
    gated.learn(0, *[(1, 0.2), (100, 0.3)] * 4)
    assert gated.get(key.prefix(10)) == 0
    assert gated.cache.lookup(key.prefix(10)).blocks == 0
    assert gated.cache.lookup(key).blocks == 64
    assert gated.get(key) == 64


def test_a_short_run_that_the_tier_holds_of_a_long_key_is_not_worth_it_either(open_cache: Open) -> None:
    gated = open_cache(DistantBackend(), gate={"prefill_tokens_per_s": 1600.0})
    key = gated.stored(64)
    gated.learn(0, *[(1, 0.2), (100, 0.3)] * 4)
    longer = KVCacheKey.from_tokens(range(10_000), block_tokens=16)
    gated.cache.put(longer.prefix(3), torch.zeros((3, *SPEC.shape), dtype=SPEC.torch_dtype()))
    gated.cache.flush(20)
    assert gated.cache.lookup(longer).blocks == gated.get(longer) == 0
    assert gated.counters().gated == 3
    assert gated.get(key) == 64
    check_sums(gated)


# -- what the speed is


def test_the_speed_of_the_engine_is_learned_from_its_prefills(open_cache: Open) -> None:
    gated = open_cache(DistantBackend())
    key = gated.stored(N)
    gated.learn(0, *SLOW_READS)
    assert gated.cache.stats().prefill_tokens_per_s == 0.0
    for _ in range(3):
        assert gated.get(key) == N
        gated.cache.note_prefill(1000, 0.001)
    assert gated.get(key) == 0
    assert gated.cache.stats().prefill_tokens_per_s == pytest.approx(1e6)


def test_deep_in_a_prompt_computing_takes_longer(open_cache: Open) -> None:
    gated = open_cache(DistantBackend())
    for tokens in (1_000, 4_000, 8_000):
        gated.cache.note_prefill(tokens, tokens * (1e-5 + 1e-8 * tokens))
    gated.learn(0, *[(1, 0.01), (8, 0.08)] * 4)
    name = gated.cache.config.l2[0].name
    assert gated.gate.verdict(name, N).declined
    assert not gated.gate.verdict(name, N, depth_blocks=4000).declined


def test_a_verdict_says_what_it_compares(open_cache: Open) -> None:
    gated = open_cache(DistantBackend(), gate=SLOW)
    name = gated.cache.config.l2[0].name
    unread = gated.gate.verdict(name, N)
    assert (unread.declined, unread.load_s) == (False, 0.0)
    assert unread.recompute_s == pytest.approx(N * 0.16)
    gated.learn(0, *SLOW_READS)
    assert gated.gate.verdict(name, N).load_s == pytest.approx(0.8)
    gated.learn(0, *[(1, 5.0), (8, 5.0)] * 4)
    time.sleep(0.011)  # a fit is that old at most
    assert gated.gate.verdict(name, N).declined
    assert not gated.gate.verdict(name, 0).declined
    assert not gated.gate.verdict("no such tier", N).declined


# -- what tiers take


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("read", ["get", "acquire", "get_each", "stream"])
def test_reads_teach_how_long_a_tier_takes(open_cache: Open, medium: type[DistantBackend], read: str) -> None:
    gated = open_cache(medium(latency_s=0.02), l1=L1)
    key = gated.stored(16)
    for n_blocks in (2, 2, 16, 16):
        READS[read](gated.cache, key.prefix(n_blocks))
        gated.cache._state.stack.l1.clear()  # type: ignore[union-attr]
    assert gated.cache.stats().tiers[0].load_latency_s + 1e-9 >= 0.02 / 2  # a part may look like time per block
    assert gated.gate.verdict(gated.cache.config.l2[0].name, 16).load_s >= 0.02


def test_stats_tell_the_bandwidth_that_callers_see(open_cache: Open) -> None:
    gated = open_cache(DistantMemory(block_s=0.004))
    key = gated.stored(16)
    took: dict[int, list[float]] = {1: [], 16: []}
    for n_blocks in (1, 16) * 4:
        began = time.perf_counter()
        assert gated.get(key.prefix(n_blocks)) == n_blocks
        took[n_blocks].append(time.perf_counter() - began)
    outside = 15 * SPEC.nbytes / (median(took[16]) - median(took[1]))
    assert gated.cache.stats().tiers[0].load_bytes_per_s == pytest.approx(outside, rel=0.2)


def test_l1_and_misses_teach_nothing(open_cache: Open) -> None:
    gated = open_cache(DistantBackend(latency_s=0.01), l1=L1)
    key = gated.stored(N)
    assert acquired(gated.cache, key) == N
    absent = KVCacheKey.from_tokens(range(160), block_tokens=16)
    for _ in range(8):
        assert gated.get(key) == N
        assert gated.get(absent) == 0
    assert gated.cache.stats().tiers[0].load_bytes_per_s == 0.0


def test_reads_that_time_out_count_as_slow(open_cache: Open) -> None:
    backend = DistantBackend()
    gated = open_cache(backend, gate=SLOW, deadline="2s", workers=1)
    key = gated.stored(N)
    name = gated.cache.config.l2[0].name
    for _ in range(4):
        assert gated.get(key) == N
    assert not gated.gate.verdict(name, N).declined
    for status in (*[ReadStatus.TIMEOUT] * 4, None, *[ReadStatus.TIMEOUT] * 4):  # never five on end
        backend.status = status
        assert gated.cache.get_each(key, room(N)).count(BlockStatus.DELIVERED) == (0 if status else N)
    time.sleep(0.011)  # a fit is that old at most
    assert gated.cache.health().tiers[name].state == "degraded"
    assert gated.gate.verdict(name, N).load_s == pytest.approx(2.0, rel=0.1)
    assert gated.gate.verdict(name, N).declined


# -- promises


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("medium", MEDIA)
def test_what_is_declined_is_not_promised(open_cache: Open, medium: type[DistantBackend], promise: str) -> None:
    backend = medium()
    gated = open_cache(backend, gate=FAST)
    key = gated.stored(N)
    backend.questions = 0
    gated.learn(0, *SLOW_READS)
    gated.gate._tiers[gated.cache.config.l2[0].name].probed_at = time.monotonic()  # no look in the background
    assert PROMISES[promise](gated.cache, key) == 0
    assert gated.get(key) == 0
    assert backend.questions == 0


@pytest.mark.parametrize("read", ["get", "acquire", "prefetch", "stream", "submit_get", "get_each"])
@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("medium", MEDIA)
def test_what_was_promised_is_loaded_although_the_tier_became_slow(
    open_cache: Open, medium: type[DistantBackend], promise: str, read: str
) -> None:
    gated = open_cache(medium(), gate=FAST, l1=L1)
    key, other = gated.stored(N), gated.stored(N, seed=1)
    assert PROMISES[promise](gated.cache, key) == N
    gated.learn(0, *SLOW_READS)
    assert READS[read](gated.cache, key) == N
    assert READS[read](gated.cache, other) == 0
    check_sums(gated)


@pytest.mark.parametrize("promise", PROMISES)
def test_asking_again_neither_repeats_nor_takes_back_a_promise(open_cache: Open, promise: str) -> None:
    gated = open_cache(DistantBackend(), gate=FAST)
    key = gated.stored(N)
    assert PROMISES[promise](gated.cache, key) == N
    gated.learn(0, *SLOW_READS)
    assert PROMISES[promise](gated.cache, key) == 0
    assert gated.get(key) == N


def test_a_promise_holds_when_the_speed_becomes_known_after_it(open_cache: Open) -> None:
    gated = open_cache(DistantBackend())
    key = gated.stored(N)
    gated.learn(0, *SLOW_READS)
    assert gated.cache.lookup(key).blocks == N
    for _ in range(3):
        gated.cache.note_prefill(1000, 0.001)
    assert gated.get(key) == N


def test_a_promise_is_not_kept_for_what_is_behind_it_alone(open_cache: Open) -> None:
    gated = open_cache(DistantBackend(), gate=FAST)
    key = gated.stored(N)
    assert gated.cache.lookup(key.prefix(4)).blocks == 4
    gated.learn(0, *SLOW_READS)
    assert gated.get(key.suffix(4)) == 0


# -- recovery


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


@pytest.mark.parametrize("medium", MEDIA)
def test_a_tier_is_used_again_when_it_has_recovered(
    open_cache: Open, medium: type[DistantBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "PROBE_S", 0.02)
    backend = medium(block_s=0.01)
    gated = open_cache(backend, gate={"prefill_tokens_per_s": 3200.0}, workers=1)  # 5 ms a block
    key = gated.stored(N)
    until(lambda: gated.get(key) == 0)
    assert gated.counters().gated > 0
    slow = len(backend.reads)
    assert until(lambda: gated.get(key) == 0 and len(backend.reads) >= slow + 6)
    assert gated.get(key) == 0  # it was looked at, and is as slow as before
    backend.block_s = 0.0
    assert until(lambda: gated.get(key) == N)
    check_sums(gated)


def test_nobody_waits_for_the_look_at_a_declined_tier(open_cache: Open) -> None:
    backend = DistantBackend(latency_s=1.0)
    gated = open_cache(backend, gate=FAST)
    key = gated.stored(N)
    gated.learn(0, *SLOW_READS)
    began = time.monotonic()
    for _ in range(20):
        assert gated.get(key) == 0
    assert time.monotonic() - began < 0.9
    assert until(lambda: len(backend.reads) >= 1)


def test_a_declined_tier_is_looked_at_now_and_then_only(open_cache: Open) -> None:
    backend = DistantBackend()
    gated = open_cache(backend, gate=FAST)
    key = gated.stored(N)
    gated.learn(0, *[(1, 1000.0), (8, 8000.0)] * 4)
    for _ in range(50):
        assert gated.get(key) == 0
    assert until(lambda: len(backend.reads) >= 3)
    for _ in range(50):
        gated.get(key)
    time.sleep(0.05)
    assert len(backend.reads) <= 3 * 4  # one round of three reads, each in up to four shares
