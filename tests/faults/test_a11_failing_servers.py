"""A11: a server that is down, hung, throttled or slow costs a few short waits, bounded memory, and nothing else."""

from __future__ import annotations

import functools
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore import BlockSpec, KVCache, KVCacheKey
from tests.faults.conftest import Rounds
from tests.faults.media import server_of
from tests.faults.s3_faults import Fault, S3FaultServer
from tests.faults.store import MIB, TIER, Store, over
from tests.support_faults import LARGE, NAMESPACE, SMALL, WatchedCache, chain, noise, rss_bytes, same, unrelated

MODES = ["refused", "hang", "slow_down", "slow"]
DEADLINE_S = 0.5
QUEUE_BLOCKS = 8
THREADS = 8
WARM = 24
"""Blocks of the keys below this are on the local disk, the newest of them in L1, too."""

BUSY_S = 0.15  # what threads of a busy test machine wait for each other
MEDIUM = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")  # 256 KiB


@pytest.fixture
def spec(rounds: Rounds) -> BlockSpec:
    """Blocks of 2 MiB take a quarter of an hour on a slow disk."""
    return LARGE if rounds(0, 1) else MEDIUM


@contextmanager
def failing(server: S3FaultServer, mode: str) -> Iterator[None]:
    """The server fails in one way as long as this lasts."""
    server.log.clear()
    port = int(server.url.rpartition(":")[2])
    if mode == "refused":
        server.stop()
    elif mode == "slow":
        server.latency_s = 20.0
    else:
        server.inject(Fault(mode))
    yield
    if mode == "refused":
        server.start(port)
    server.latency_s = 0.0
    server.inject()


class Load:
    """Calls of a cache with a local disk and a server, in an order of its own.

    Args:
        store: The server.
        local: Directory of the disk.
        spec: Of the blocks.
        first: Whether the disk is asked before the server.
    """

    def __init__(self, store: Store, local: Path, spec: BlockSpec, *, first: bool) -> None:
        self.spec = spec
        self.block = noise(spec, [0])
        self.queue_bytes = QUEUE_BLOCKS * spec.nbytes
        config = store.config(l1=f"{16 * spec.nbytes}B", deadline=DEADLINE_S, queue=self.queue_bytes)
        del config["l2"][0]["capacity"]
        disk = {"backend": "nvme", "name": "disk", "path": str(local), "capacity": "2GiB", "codec": "none"}
        config["l2"].insert(0 if first else 1, {**disk, "admit": "all"})
        self.cache = WatchedCache(KVCache.open(config, spec=spec, namespace=NAMESPACE), 7.0)

    def key(self, i: int) -> KVCacheKey:
        return unrelated(i, self.spec)

    def put(self, i: int) -> None:
        self.cache.put(self.key(i), self.block)

    def get(self, i: int) -> bool:
        found = self.cache.fetch(self.key(i))
        assert found is None or same(found, self.block)
        return found is not None

    def mixed(self, first: int, n: int) -> list[Callable[[], object]]:
        """As many gets of what is nowhere as puts, in turns; puts store the ids from ``first + 1000`` on."""
        gets = [functools.partial(self.get, i) for i in range(first, first + n)]
        puts = [functools.partial(self.put, i) for i in range(first + 1000, first + 1000 + n)]
        return [call for pair in zip(gets, puts, strict=True) for call in pair]

    def warm(self, n: int) -> list[float]:
        """Read what the disk has; returns how long each took."""
        hits: list[bool] = []
        seconds = together([functools.partial(lambda i: hits.append(self.get(i)), i % WARM) for i in range(n)])
        assert hits == [True] * n
        return seconds


def together(calls: list[Callable[[], object]]) -> list[float]:
    """Run calls from several threads; returns the seconds that each took, in the order in which they began."""
    took: list[tuple[float, float]] = []
    errors: list[BaseException] = []
    waiting = iter(calls)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                call = next(waiting, None)
            if call is None:
                return
            start = time.monotonic()
            try:
                call()
            except BaseException as e:  # noqa: BLE001 - judged by the test
                errors.append(e)
            took.append((start, time.monotonic() - start))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return [seconds for _, seconds in sorted(took)]


def assert_soon_quick(seconds: list[float], healthy: list[float]) -> None:
    """A few calls wait, none longer than the deadline; the others wait for nobody."""
    usual = statistics.median(healthy)
    assert max(seconds) < DEADLINE_S + 2 * BUSY_S + max(healthy), sorted(seconds)[-20:]
    assert sum(s > BUSY_S + max(healthy) for s in seconds) <= 20, sorted(seconds)[-30:]
    assert statistics.median(seconds) < 2 * usual + 0.02, (statistics.median(seconds), usual)


@pytest.mark.parametrize(("mode", "first"), [*[(mode, True) for mode in MODES], ("hang", False)])
@over("S")
def test_a_failing_server_costs_a_few_short_waits(
    store: Store, mode: str, first: bool, spec: BlockSpec, tmp_path: Path, rounds: Rounds
) -> None:
    server, n = server_of(store), rounds(60, 200)
    load = Load(store, tmp_path / "disk", spec, first=first)
    with load.cache as cache:
        for i in range(WARM):
            load.put(i)
            cache.flush(60)
        healthy, usual = together(load.mixed(10_000, 20)), statistics.median(load.warm(n))
        cache.flush(60)
        before_bytes, began = rss_bytes(), time.monotonic()
        with failing(server, mode):
            assert_soon_quick(together(load.mixed(1000, n)), healthy)
            assert rss_bytes() - before_bytes <= load.queue_bytes + 64 * MIB
            assert cache.tier(TIER).queued_bytes <= load.queue_bytes
            counters = cache.tier(TIER).counters
            assert counters.io_errors + counters.timeouts > 0
            assert statistics.median(load.warm(n)) < 2 * usual + 0.02
            failed_s = time.monotonic() - began
            assert len(server.requests()) <= 60 * max(1.0, failed_s / 10), [r.method for r in server.requests()]
            assert cache.health().state == "degraded"
        assert_comes_back(load, failed_s)
        for i in range(20):
            load.put(90_000 + i)
        cache.flush(60)
        counters = cache.tier(TIER).counters
        accepted = counters.stored + counters.refused_queue_full + counters.refused_medium + counters.stores_dropped
        assert accepted >= cache.stats().cache.puts  # nothing was lost without being counted


def assert_comes_back(load: Load, failed_s: float) -> None:
    """Without a restart: the next probe comes no later than twice the time of the trouble."""
    began = time.monotonic()
    stored = load.cache.tier(TIER).counters.stored
    for i in itertools.count(50_000):
        if load.cache.tier(TIER).counters.stored > stored and load.cache.health().tiers[TIER].state == "ok":
            return
        assert time.monotonic() - began < 2 * failed_s + 3.0, load.cache.health()
        load.put(i)
        load.get(i + 10_000)
        time.sleep(0.05)


@over("S")
def test_a_block_that_only_the_server_has_is_served_again_when_it_is_back(store: Store) -> None:
    with store.open(deadline=DEADLINE_S) as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
        began = time.monotonic()
        with failing(server_of(store), "slow_down"):
            assert [cache.fetch(unrelated(0)) for _ in range(20)] == [None] * 20
            asked = len(server_of(store).requests())
            failed_s = time.monotonic() - began
        assert asked <= 60, [f"{r.method} {r.path}" for r in server_of(store).log]
        back = time.monotonic()
        while (found := cache.fetch(unrelated(0))) is None:
            assert time.monotonic() - back < 2 * failed_s + 2.0
            time.sleep(0.02)
        assert same(found, noise(SMALL, [0]))


@pytest.mark.parametrize("mode", ["hang", "slow_down"])
@over("S")
def test_looking_only_is_suspended_too(store: Store, mode: str) -> None:
    """Schedulers look up every prompt, and may read none of them."""
    with store.open(deadline=DEADLINE_S, read_timeout=0.3, l1="1MiB") as cache:
        cache.store(chain(4, seed=11), noise(SMALL, range(4)))
        with failing(server_of(store), mode):
            began = time.monotonic()
            for i in range(100):
                assert cache.lookup(chain(4, seed=1000 + i)).blocks == 0
            assert time.monotonic() - began < 7 * (DEADLINE_S + BUSY_S)
            assert len(server_of(store).requests()) <= 60
        assert cache.tier(TIER).counters.rejected_by_breaker > 0
        deadline = time.monotonic() + 10
        while cache.health().tiers[TIER].state != "ok" and time.monotonic() < deadline:
            cache.lookup(chain(4, seed=11))
            cache.contains_each(chain(4, seed=2000))
            time.sleep(0.02)
        assert cache.lookup(chain(4, seed=11)).blocks == 4


@over("S")
def test_opening_and_closing_end_while_the_server_hangs(store: Store) -> None:
    config = store.config(l1="1MiB", required=False)

    def opened() -> WatchedCache:
        return WatchedCache(KVCache.open(config, spec=SMALL, namespace=NAMESPACE), 5.5)

    block = noise(SMALL, [0])
    with failing(server_of(store), "hang"):
        began = time.monotonic()
        cache = opened()
        assert time.monotonic() - began < 3.0
        cache.put(unrelated(0), block)
        assert cache.fetch(unrelated(0)) is not None
        assert cache.health().tiers[TIER].state == "down"
        began = time.monotonic()
        cache.close()
        assert time.monotonic() - began < 5.0
    cache = opened()
    assert cache.fetch(unrelated(0)) is None
    with failing(server_of(store), "hang"):
        for i in range(1, 5):
            cache.put(unrelated(i), block)
        cache.close()  # within 5.5 s
    with store.open() as again:
        again.store(unrelated(9), block)
        found = again.fetch(unrelated(9))
        assert found is not None
        assert same(found, block)
