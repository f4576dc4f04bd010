"""The tier as a scheduler sees it, over real caches and misbehaving media."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_vllm.metrics import HEALTH, LOADED, LOOKUPS, STORED, TierMetrics
from kvstore_vllm.transfers import Transfer

from kvstore import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    ClosedError,
    ConfigError,
    KVCache,
    KVCacheKey,
)
from kvstore.backend import Backend, Capability
from kvstore.memory_backend import MemoryBackend, MemoryOptions
from kvstore.testing.doubles import FaultyBackend, HangingBackend, TornBackend
from kvstore.testing.registering import register_backend
from kvstore.types import PutStatus
from tests.unit.vllm.support import ROW_BYTES, OpenTier, offload_keys, request

MEMORY: dict[str, Any] = {"l2": [{"backend": "memory", "capacity": "4MiB"}]}


class DistantHangingBackend(HangingBackend):
    """Hangs in the threads of the tier, as a medium behind a network does."""

    def __init__(self, inner: Backend, operations: tuple[str, ...]) -> None:
        super().__init__(inner, operations)
        self.capabilities = inner.capabilities & ~Capability.CALLER_READS  # type: ignore[misc]  # as in its parent


@pytest.fixture
def open_tier() -> Iterator[Callable[..., OpenTier]]:
    opened: list[OpenTier] = []

    def make(config: Any = MEMORY, **more: Any) -> OpenTier:
        opened.append(OpenTier(config, **more))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


def lmdb(folder: Path) -> dict[str, Any]:
    return {"l2": [{"backend": "lmdb", "path": str(folder), "capacity": "8MiB"}]}


def test_what_one_engine_stored_another_one_finds_and_loads(tmp_path: Path) -> None:
    keys = offload_keys(6)
    first = OpenTier(lmdb(tmp_path))
    data = first.store(keys, context=request(keys))
    first.close()
    second = OpenTier(lmdb(tmp_path))
    try:
        assert second.find(keys, request(keys)) == [True] * 6
        outcome = second.transfer(keys, range(10, 16), is_load=True, context=request(keys))
        assert outcome.done == frozenset(keys)
        assert [second.view.row(row) for row in range(10, 16)] == data
    finally:
        second.close()


def test_lookups_stop_at_the_first_absent_block(open_tier: Callable[..., OpenTier]) -> None:
    tier = open_tier()
    keys = offload_keys(5)
    tier.store([*keys[:2], keys[4]])
    assert tier.find(keys, request(keys)) == [True, True, False, False, False]


def test_a_lookup_never_waits_and_always_ends(open_tier: Callable[..., OpenTier]) -> None:
    hanging = DistantHangingBackend(MemoryBackend(), ("exists_many",))
    registry, name = register_backend(lambda: hanging, options=MemoryOptions)
    config = {"l2": [{"backend": name, "capacity": "1MiB", "deadline": "300ms"}]}
    tier = open_tier(config, registry=registry, lookup_timeout=0.05)
    (key,) = offload_keys(1)
    try:
        started = time.monotonic()
        assert tier.tier.find(key, request()) is None
        tier.tier.ask()
        assert hanging.entered.wait(5)
        end = time.monotonic() + 5
        while tier.tier.find(key, request()) is None and time.monotonic() < end:
            time.sleep(0.005)  # the scheduler's next step
        assert tier.tier.find(key, request()) is False
        assert time.monotonic() - started < 0.3
        tier.settle()
    finally:
        hanging.release()


def test_a_stored_block_is_a_hit_although_it_was_a_miss_before(open_tier: Callable[..., OpenTier]) -> None:
    tier = open_tier()
    keys = offload_keys(2)
    assert tier.find(keys) == [False, False]
    tier.store(keys)
    assert tier.find(keys) == [True, True]


def test_known_blocks_are_not_copied_again(open_tier: Callable[..., OpenTier]) -> None:
    tier = open_tier()
    keys = offload_keys(3)
    tier.store(keys)
    wait_for(lambda: tier.find(keys) == [True] * 3)
    outcome = tier.transfer(keys, range(3), is_load=False)
    assert outcome.done == frozenset(keys)
    assert outcome.moved_blocks == 0
    assert tier.tier.cache.stats().cache.puts == 3


class TestFailedLoads:
    @pytest.fixture
    def torn(self) -> tuple[Any, Any]:
        """A medium of which every record is damaged on the way, as long as ``tearing`` is set."""
        tearing = threading.Event()
        tearing.set()

        def tear(good: bytes) -> bytes:
            return good[:-1] + bytes([good[-1] ^ 1]) if tearing.is_set() else good

        return register_backend(lambda: TornBackend(MemoryBackend(), tear), options=MemoryOptions), tearing

    def test_a_damaged_block_is_a_miss_until_it_is_stored_again(
        self, torn: tuple[Any, Any], open_tier: Callable[..., OpenTier]
    ) -> None:
        (registry, name), tearing = torn
        tier = open_tier({"l2": [{"backend": name, "capacity": "1MiB"}]}, registry=registry)
        keys = offload_keys(2)
        data = tier.store(keys)
        wait_for(lambda: tier.find(keys) == [True, True])
        before = tier.view.row(20)
        outcome = tier.transfer(keys, (20, 21), is_load=True)
        assert outcome.failed == keys
        assert tier.view.row(20) == before
        assert tier.find(keys) == [False, False]

        tearing.clear()
        tier.store(keys)
        wait_for(lambda: tier.find(keys) == [True, True])
        assert tier.transfer(keys, (20, 21), is_load=True).done == frozenset(keys)
        assert [tier.view.row(20), tier.view.row(21)] == data

    def test_what_is_whole_in_a_partly_bad_load_is_reported(self, open_tier: Callable[..., OpenTier]) -> None:
        tier = open_tier()
        keys = offload_keys(4)
        data = tier.store([keys[0], keys[2]])
        outcome = tier.transfer(keys, (20, 21, 22, 23), is_load=True, context=request(keys))
        assert outcome.done == {keys[0], keys[2]}
        assert outcome.failed == [keys[1], keys[3]]
        assert [tier.view.row(20), tier.view.row(22)] == data

    @pytest.mark.parametrize("fault", [BackendUnavailableError, BackendTimeoutError, BackendError])
    def test_a_medium_that_fails_never_raises_here(
        self, fault: type[BackendError], open_tier: Callable[..., OpenTier]
    ) -> None:
        faulty = FaultyBackend(MemoryBackend(), get_many=fault("gone"), read_many=fault("gone"))
        faulty.failing = False
        registry, name = register_backend(lambda: faulty, options=MemoryOptions)
        tier = open_tier({"l2": [{"backend": name, "capacity": "1MiB"}]}, registry=registry)
        keys = offload_keys(2)
        tier.store(keys)
        wait_for(lambda: tier.find(keys) == [True, True])
        faulty.failing = True
        assert tier.transfer(keys, (20, 21), is_load=True).failed == keys
        assert tier.find(keys) == [False, False]
        assert not tier.tier.busy

    def test_an_error_of_ours_is_a_failed_job(
        self, open_tier: Callable[..., OpenTier], caplog: pytest.LogCaptureFixture
    ) -> None:
        tier = open_tier()
        with caplog.at_level(logging.ERROR):
            outcomes = [tier.transfer([b"\0\0\0\0"], (0,), is_load=True) for _ in range(3)]
        assert [outcome.failed for outcome in outcomes] == [[b"\0\0\0\0"]] * 3
        assert len(caplog.records) == 1


def test_a_refused_store_is_reported_as_failed(open_tier: Callable[..., OpenTier]) -> None:
    hanging = DistantHangingBackend(MemoryBackend(), ("put_many",))
    registry, name = register_backend(lambda: hanging, options=MemoryOptions)
    config = {"l2": [{"backend": name, "capacity": "1MiB", "queue": 2 * ROW_BYTES, "deadline": "200ms"}]}
    tier = open_tier(config, registry=registry, store_timeout=0.1)
    try:
        outcome = tier.transfer(offload_keys(40), range(40), is_load=False)
        assert outcome.failed
        assert tier.tier.transfers.take_counts()["store", "refused"] == len(outcome.failed)
    finally:
        hanging.release()


def test_a_medium_that_is_full_makes_no_noise(open_tier: Callable[..., OpenTier]) -> None:
    registry, name = register_backend(
        lambda: FaultyBackend(MemoryBackend(), put_many=PutStatus.FULL), options=MemoryOptions
    )
    tier = open_tier({"l2": [{"backend": name, "capacity": "1MiB"}]}, registry=registry)
    keys = offload_keys(3)
    tier.store(keys)
    assert tier.find(keys) == [False] * 3


class TestEvents:
    def test_stored_and_removed_blocks_are_told_in_vllms_keys(self, open_tier: Callable[..., OpenTier]) -> None:
        room = {"l2": [{"backend": "memory", "capacity": 6 * ROW_BYTES, "codec": "none"}]}
        tier = open_tier(room, want_events=True)
        keys = offload_keys(12)
        for key in keys:
            tier.store([key])
        stored: set[bytes] = set()
        removed: set[bytes] = set()

        def told() -> bool:
            for event in tier.tier.take_events():
                (removed if event.removed else stored).update(event.keys)
            return stored == set(keys) and len(removed) >= 6

        wait_for(told)
        assert removed < stored
        assert tier.find(sorted(removed)) == [False] * len(removed)

    def test_a_block_that_another_tier_still_has_is_not_told_as_removed(
        self, open_tier: Callable[..., OpenTier]
    ) -> None:
        tiers = [
            {"backend": "memory", "capacity": 6 * ROW_BYTES, "codec": "none", "name": "small"},
            {"backend": "memory", "capacity": "4MiB", "name": "large"},
        ]
        tier = open_tier({"l2": tiers}, want_events=True)
        keys = offload_keys(12)
        for key in keys:
            tier.store([key])
        wait_for(lambda: tier.tier.cache.stats().tiers[0].counters.evicted >= 6)
        assert tier.find(keys, request(keys)) == [True] * 12
        assert not any(event.removed for event in tier.tier.take_events())

    def test_nothing_is_kept_when_nobody_asks(self, open_tier: Callable[..., OpenTier]) -> None:
        tier = open_tier()
        keys = offload_keys(2)
        tier.store(keys)
        wait_for(lambda: tier.find(keys) == [True, True])
        assert tier.tier.take_events() == []


class TestReset:
    def test_clear_empties_the_namespace_for_everybody(
        self, tmp_path: Path, open_tier: Callable[..., OpenTier]
    ) -> None:
        tier, other = open_tier(lmdb(tmp_path)), open_tier(lmdb(tmp_path), lookup_ttl=0.01)
        keys = offload_keys(2)
        tier.store(keys)
        assert other.find(keys) == [True, True]
        tier.tier.drain()
        assert tier.find(keys) == [False, False]
        wait_for(lambda: other.find(keys) == [False, False])
        tier.store(keys)
        wait_for(lambda: other.find(keys) == [True, True])

    def test_part_leaves_the_blocks_to_the_others(self, tmp_path: Path, open_tier: Callable[..., OpenTier]) -> None:
        tier, other = open_tier(lmdb(tmp_path), on_reset="part"), open_tier(lmdb(tmp_path))
        keys = offload_keys(2)
        tier.store(keys)
        tier.tier.drain()
        assert tier.find(keys) == [False, False]
        assert other.find(keys) == [True, True]

    def test_keep_keeps(self, open_tier: Callable[..., OpenTier]) -> None:
        tier = open_tier(on_reset="keep")
        keys = offload_keys(2)
        tier.store(keys)
        tier.tier.drain()
        assert tier.find(keys) == [True, True]

    def test_old_blocks_stay_out_of_reach_although_the_medium_cannot_be_cleared(
        self, open_tier: Callable[..., OpenTier], caplog: pytest.LogCaptureFixture
    ) -> None:
        faulty = FaultyBackend(MemoryBackend(), epoch=BackendUnavailableError("gone"))
        faulty.failing = False
        registry, name = register_backend(lambda: faulty, options=MemoryOptions)
        tier = open_tier({"l2": [{"backend": name, "capacity": "1MiB"}]}, registry=registry)
        keys = offload_keys(2)
        tier.store(keys)
        faulty.failing = True
        with caplog.at_level(logging.WARNING):
            tier.tier.drain()
        faulty.failing = False
        assert any("salt of its own" in record.getMessage() for record in caplog.records)
        assert tier.find(keys) == [False, False]

    def test_drain_waits_for_every_transfer(self, open_tier: Callable[..., OpenTier]) -> None:
        hanging = DistantHangingBackend(MemoryBackend(), ("get_many", "read_many"))
        registry, name = register_backend(lambda: hanging, options=MemoryOptions)
        tier = open_tier({"l2": [{"backend": name, "capacity": "1MiB", "deadline": "300ms"}]}, registry=registry)
        keys = offload_keys(1)
        tier.store(keys)
        tier.tier.load(Transfer(99, keys, (20,), is_load=True))
        assert tier.tier.busy
        tier.tier.drain()
        assert [outcome.transfer.job_id for outcome in tier.tier.finished()] == [99]
        hanging.release()


class TestClose:
    def test_queued_blocks_are_written_out(self, tmp_path: Path) -> None:
        keys = offload_keys(4)
        tier = OpenTier(lmdb(tmp_path))
        tier.tier.store(Transfer(0, keys, range(4), is_load=False))
        assert tier.tier.transfers.wait(10)
        tier.close()
        again = OpenTier(lmdb(tmp_path))
        assert again.find(keys) == [True] * 4
        again.close()

    def test_vllms_memory_is_given_back(self) -> None:
        tier = OpenTier(MEMORY)
        tier.store(offload_keys(2))
        tier.close()
        tier.view.view.release()  # BufferError while anything still looks into it

    def test_a_closed_tier_answers_misses_and_fails_jobs(self) -> None:
        tier = OpenTier(MEMORY)
        tier.close()
        tier.close()
        keys = offload_keys(1)
        assert tier.tier.find(keys[0], request()) is False
        tier.tier.ask()
        assert tier.transfer(keys, (0,), is_load=True).failed == keys
        with pytest.raises(ClosedError):
            tier.tier.cache.stats()

    def test_an_open_that_fails_says_why_and_leaves_nothing(self) -> None:
        before = threading.active_count()
        with pytest.raises(ConfigError, match="capacity"):
            OpenTier({"l2": [{"backend": "memory", "capacity": "much"}]})
        assert threading.active_count() == before


def test_a_plain_program_finds_what_the_tier_stored(tmp_path: Path) -> None:
    keys = offload_keys(3)
    tier = OpenTier(lmdb(tmp_path))
    tier.store(keys)
    spec, namespace = tier.tier.cache.spec, tier.tier.cache.namespace
    tier.close()
    key = KVCacheKey.from_block_hashes([k[:-4] for k in keys], block_tokens=16, chained=True)
    with KVCache.open(lmdb(tmp_path), spec=spec, namespace=namespace) as cache:
        assert cache.lookup(key).blocks == 3


def test_metrics_count_each_thing_once(open_tier: Callable[..., OpenTier]) -> None:
    tier = open_tier()
    metrics = TierMetrics(tier.tier)
    keys = offload_keys(3)
    tier.store(keys[:2])
    wait_for(lambda: tier.find(keys[:1]) == [True])
    tier.transfer(keys, (20, 21, 22), is_load=True)
    seen = Stats()
    metrics.fill(seen)
    assert seen.counters[STORED, "accepted"] == 2
    assert (seen.counters[LOADED, "delivered"], seen.counters[LOADED, "absent"]) == (2, 1)
    assert seen.counters[LOOKUPS, "remembered"] > 0
    assert seen.gauges[HEALTH, "memory"] == 0
    again = Stats()
    metrics.fill(again)
    assert not again.counters
    assert not again.gauges


class Stats(SimpleNamespace):
    """vLLM's collector of observations."""

    def __init__(self) -> None:
        super().__init__(counters={}, gauges={})

    def increase_counter(self, name: str, value: float, labels: tuple[str, ...]) -> None:
        (label,) = labels
        self.counters[name, label] = self.counters.get((name, label), 0) + value

    def set_gauge(self, name: str, value: float, labels: tuple[str, ...]) -> None:
        (label,) = labels
        self.gauges[name, label] = value


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)  # the pause of a poll with a deadline
