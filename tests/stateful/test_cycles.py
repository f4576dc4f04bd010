"""Ten thousand times put, get and delete: nothing grows, and the medium never holds more than it may.

The long form runs with ``--soak``; without it the same cycles run fewer times.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from tests.stateful.media import Place, server_process, taken_bytes
from tests.support import blocks_of, same_bytes

MIB = 1 << 20
RSS_GROWTH = 1.05
SPACE = 1.02
LATE = 4  # threads, connections and files that are first needed late, or open at that moment; a leak makes hundreds
SAMPLE_S = 0.01
CHAIN = 2  # blocks of a cycle
VARIANTS = 16  # different contents, made once: cycles measure the store, not a random generator


@dataclass(frozen=True)
class Course:
    """How one medium is driven: block size and capacity so that the quick form overfills it too."""

    medium: str
    spec: BlockSpec
    capacity: int
    quick: int
    soak: int = 10_000


def spec_of(layers: int) -> BlockSpec:
    """Blocks of 4 KiB a layer."""
    return BlockSpec(layers=layers, kv_heads=1, head_dim=64, block_tokens=16, dtype="bfloat16")


COURSES = (
    Course("memory", spec_of(2), 2 * MIB, 4000),
    Course("lmdb", spec_of(2), 4 * MIB, 3000),
    Course("segments", spec_of(16), 64 * MIB, 2000),
    Course("tree", spec_of(4), 8 * MIB, 400),
    Course("s3", spec_of(2), 1 << 40, 100),
)


@dataclass
class Sampler:
    """Looks at the space of a store 100 times a second in a thread of its own."""

    look: Callable[[], dict[str, int]]
    most: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0
    looking: threading.Lock = field(default_factory=threading.Lock)
    """Held while a directory may be open; who counts descriptors takes it."""

    def __enter__(self) -> Self:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        started = time.monotonic()
        while not self._end.wait(max(0.0, started + self.samples * SAMPLE_S - time.monotonic())):
            with self.looking:
                found = self.look()
            for name, value in found.items():
                self.most[name] = max(self.most.get(name, 0), value)
            self.samples += 1
            self.seconds = time.monotonic() - started


@dataclass(frozen=True)
class Held:
    """What the process holds."""

    threads: int
    files: int
    rss_kib: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        files = [path for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
        return cls(int(fields["Threads"]), len(files), int(fields["VmRSS"].split()[0]))


class Cycles:
    """Puts a chain, reads it back, and deletes every other one; what stays overfills the medium."""

    def __init__(self, cache: KVCache, spec: BlockSpec) -> None:
        self._cache = cache
        self._contents = [blocks_of(spec, CHAIN, seed=i) for i in range(VARIANTS)]
        self._out = torch.empty_like(self._contents[0])
        self.done = 0

    def run(self, count: int) -> None:
        for i in range(self.done, self.done + count):
            blocks, out = self._contents[i % VARIANTS], self._out
            key = KVCacheKey.from_block_hashes(
                [bytes([number]) * 24 + i.to_bytes(8, "big") for number in range(CHAIN)], block_tokens=16, chained=True
            )
            assert self._cache.put(key, blocks) == CHAIN
            self._cache.flush(20)
            assert self._cache.get(key, out) == CHAIN
            assert same_bytes(out, blocks)
            if i % 2:
                assert self._cache.delete(key) == CHAIN
                assert self._cache.get(key, out) == 0
        self.done += count


def space_of(cache: KVCache, folder: Path) -> Callable[[], dict[str, int]]:
    """What the sampler looks at: what the store counts, and what its files really take."""

    def look() -> dict[str, int]:
        (tier,) = cache.stats().tiers
        return {"payload_bytes": tier.payload_bytes, "file_bytes": taken_bytes(folder)}

    return look


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with server_process() as url:
        yield url


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("course", COURSES, ids=lambda course: course.medium)
def test_cycles_leave_nothing_behind(course: Course, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    count = course.soak if request.config.getoption("--soak") else course.quick
    url = request.getfixturevalue("s3_url") if course.medium == "s3" else ""
    place = Place(tmp_path, url)
    capacity = {} if course.medium == "s3" else {"capacity": course.capacity}
    config: dict[str, Any] = {"l1": {"enabled": False}, "l2": [place.tier(course.medium, "cycles", **capacity)]}
    sample = blocks_of(course.spec, VARIANTS)
    assert same_bytes(sample, sample.clone())  # torch starts the threads of its own now, not within the measurement
    before = Held.now()
    with KVCache.open(config, spec=course.spec, namespace=Namespace(model="m", revision="r")) as cache:
        cycles = Cycles(cache, course.spec)
        started = time.monotonic()
        with Sampler(space_of(cache, place.folder(course.medium, "cycles"))) as sampler:
            cycles.run(count // 2)  # the medium is full by then, all threads and connections are there
            with sampler.looking:
                warm = Held.now()
            cycles.run(count - count // 2)
            with sampler.looking:
                end = Held.now()
        seconds = time.monotonic() - started
        counters = cache.stats().tiers[0].counters
    after = Held.now()

    request.node.user_properties.append(("held", str((before, warm, end, after))))
    print(f"{course.medium}: {count:,} cycles in {seconds:.1f} s, {before} -> {warm} -> {end} -> {after}")
    print(f"{sampler.samples} samples in {sampler.seconds:.1f} s, most {sampler.most}, evicted {counters.evicted}")
    assert end.threads <= warm.threads + LATE
    assert end.files <= warm.files + LATE
    assert end.rss_kib <= RSS_GROWTH * warm.rss_kib
    assert (after.threads, after.files) == (before.threads, before.files)
    assert (counters.corrupt, counters.key_mismatch, counters.io_errors, counters.timeouts) == (0, 0, 0, 0)
    if course.medium != "s3":  # a bucket has no capacity: lifecycle and gc bound it
        assert counters.evicted > 0, "not overfilled"
        assert_within(sampler.most, course)


def assert_within(most: dict[str, int], course: Course) -> None:
    """The bound that holds at every moment."""
    if course.medium == "lmdb":
        assert most["payload_bytes"] <= course.capacity
        assert most["file_bytes"] <= 1.25 * course.capacity + MIB
    else:
        assert most["payload_bytes"] <= SPACE * course.capacity
        assert most["file_bytes"] <= SPACE * course.capacity
