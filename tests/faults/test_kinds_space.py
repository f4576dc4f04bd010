"""Kinds of trouble with room: leftovers of a kill, files that cannot go, blocks of other sizes, listings."""

from __future__ import annotations

import ast
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from kvstore import BlockSpec, KVCache
from kvstore.types import Presence
from tests.faults.process import ROOT, Forge, Shim
from tests.faults.store import MIB, TIER, Store, over
from tests.stateful.media import taken_bytes
from tests.support_faults import LARGE, NAMESPACE, SMALL, WatchedCache, noise, same, unrelated

CAPACITY = 64 * MIB
MEDIUM = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")  # 256 KiB
FULL_BLOCKS = CAPACITY // MEDIUM.nbytes
TINY = BlockSpec(layers=1, kv_heads=1, head_dim=16, block_tokens=16, dtype="bfloat16")  # 1 KiB


class Sampler:
    """Looks 100 times a second at what the files of a store take.

    A walk is no snapshot: it may count a victim and what took its place, so blocks are small beside the capacity.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: list[int] = []

    def _run(self) -> None:
        while not self._over.wait(0.01):
            self.samples.append(taken_bytes(self._root))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


FILL = """
MEDIUM = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
cache = STORE.open(spec=MEDIUM)
for i in range(int(ARGS[0])):
    cache.put(unrelated(i, MEDIUM), noise(MEDIUM, [i]))
    cache.flush(60)
print("full", flush=True)
for i in range(1000, 2000):
    cache.put(unrelated(i, MEDIUM), noise(MEDIUM, [i]))
"""


@over("LNT")
def test_what_a_killed_process_left_counts_before_the_first_put(store: Store, forge: Forge) -> None:
    with forge.start(FILL, store, FULL_BLOCKS * 9 // 10) as writer:
        assert writer.line() == "full"
        writer.kill()
    left_bytes = taken_bytes(store.root)
    assert left_bytes > 0.8 * CAPACITY
    with Sampler(store.root) as sampler, store.open(spec=MEDIUM) as cache:
        for i in range(3000, 3000 + FULL_BLOCKS // 2):
            cache.store(unrelated(i, MEDIUM), noise(MEDIUM, [i]))
        tier = cache.tier(TIER)
        assert tier.counters.stored == FULL_BLOCKS // 2
        assert tier.counters.evicted > 0
    assert len(sampler.samples) > 5
    assert max(sampler.samples) <= store.bound(CAPACITY)


def eventually(law: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Poll; what a tier says of its room is a second old."""
    deadline = time.monotonic() + seconds
    while not law() and time.monotonic() < deadline:
        time.sleep(0.05)
    return law()


def frozen(paths: list[Path], *, on: bool) -> None:
    """Let files be neither changed nor removed, not even by root."""
    import fcntl
    import struct

    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, 0x80086601, bytes(8)))  # FS_IOC_GETFLAGS
            flags = flags | 0x10 if on else flags & ~0x10  # FS_IMMUTABLE_FL
            fcntl.ioctl(fd, 0x40086602, struct.pack("l", flags))  # FS_IOC_SETFLAGS
        finally:
            os.close(fd)


@pytest.fixture
def immutable(tmp_path: Path) -> Iterator[list[Path]]:
    """Whoever puts files here has them thawed at the end."""
    probe, paths = tmp_path / "probe", list[Path]()
    probe.touch()
    try:
        frozen([probe], on=True)
        frozen([probe], on=False)
    except OSError as e:
        pytest.skip(f"files cannot be made immutable here: {e}")
    yield paths
    frozen([path for path in paths if path.exists()], on=False)


@over("T")
def test_a_file_that_cannot_be_removed_goes_on_counting_and_goes_later(store: Store, immutable: list[Path]) -> None:
    with store.open(capacity=4 * MIB, pack=1) as cache:
        numbers = itertools.count()
        while cache.tier(TIER).counters.evicted == 0:
            i = next(numbers)
            cache.store(unrelated(i), noise(SMALL, [i]))
        victims = [store.root / place for place in store.places()]
        immutable += victims
        frozen(victims, on=True)
        refused = cache.tier(TIER).counters.refused_medium
        for i in itertools.islice(numbers, 20):
            cache.store(unrelated(i), noise(SMALL, [i]))
            assert taken_bytes(store.root) <= store.bound(4 * MIB)
        assert cache.tier(TIER).counters.refused_medium > refused
        still_bytes = sum(path.stat().st_blocks * 512 for path in victims)
        assert eventually(lambda: cache.tier(TIER).payload_bytes >= still_bytes)
        frozen(victims, on=False)
        assert_puts_work_again(cache, numbers)
        for _ in range(60):  # and eviction goes on
            i = next(numbers)
            cache.store(unrelated(i), noise(SMALL, [i]))
            assert cache.fetch(unrelated(i)) is not None
        assert taken_bytes(store.root) <= store.bound(4 * MIB)
        assert sum(path.exists() for path in victims) < len(victims) // 2


def assert_puts_work_again(cache: WatchedCache, numbers: Iterator[int]) -> None:
    """Soon, and by themselves: a suspended tier is tried again after a second or two."""
    deadline = time.monotonic() + 10
    for i in numbers:
        cache.store(unrelated(i), noise(SMALL, [i]))
        if cache.fetch(unrelated(i)) is not None:
            return
        assert time.monotonic() < deadline, cache.tier(TIER)
        time.sleep(0.05)


DELETE_DURING_PUT = """
shim = FaultSwitch(Path(ARGS[0]))
reports = []
with STORE.open(l1="1MiB") as cache:
    cache.store(unrelated(99), noise(SMALL, [99]))
    shim.set(Fault.SLOW, delay_ms=10)
    for i in range(12):
        cache.put(unrelated(i), noise(SMALL, [i]))
        time.sleep(0.004 * i)  # at another moment of the write each time
        cache.delete(unrelated(i))
    cache.flush(60)
    shim.off()
    cache._state.stack.l1.clear()
    there = []
    for i in [*range(12), 99]:
        found = cache.fetch(unrelated(i))
        assert found is None or same(found, noise(SMALL, [i])), i
        there.append(found is not None)
    deadline = time.monotonic() + 3
    while cache.tier(TIER).records != sum(there) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(json.dumps(dict(there=there, records=cache.tier(TIER).records, injected=shim.injected)))
"""


@over("LNT")
def test_a_block_deleted_while_it_is_written_is_stored_and_counted_or_neither(
    store: Store, forge: Forge, shim: Shim
) -> None:
    report = forge.work(DELETE_DURING_PUT, store, shim.control, shim=shim)
    assert report["injected"] > 0
    assert report["records"] == sum(report["there"]), report
    assert report["there"][-1]
    with store.open() as cache:
        stored = sum(cache.fetch(unrelated(i)) is not None for i in [*range(12), 99])
        assert (stored, cache.tier(TIER).records) == (report["records"], report["records"])


@over("LNT")
def test_room_is_counted_in_bytes_whatever_the_size_of_blocks(store: Store) -> None:
    with store.open(spec=TINY) as cache:
        for i in range(500):
            cache.put(unrelated(i, TINY), noise(TINY, [i]))
        cache.flush(60)
    with Sampler(store.root) as sampler, store.open(spec=MEDIUM) as cache:
        for i in range(FULL_BLOCKS * 3 // 2):
            cache.put(unrelated(i, MEDIUM), noise(MEDIUM, [i]))
            if i % 8 == 7:
                cache.flush(60)
        assert cache.tier(TIER).counters.refused_medium <= 4  # on a busy machine a deadline passes
        assert cache.fetch(unrelated(FULL_BLOCKS * 3 // 2 - 1, MEDIUM)) is not None
    assert max(sampler.samples) <= store.bound(CAPACITY)
    assert max(sampler.samples) > CAPACITY // 2


LISTINGS = """
listed = []
def listen(event, args):
    if event in {"os.listdir", "os.scandir"} and looking and "upkeep" not in threading.current_thread().name:
        listed.append((event, str(args[0]), threading.current_thread().name))
looking = False
sys.addaudithook(listen)
with STORE.open() as cache:
    for i in range(300):
        cache.put(unrelated(i), noise(SMALL, [i]))
        if i % 50 == 49:
            cache.flush(60)
    looking = True
    for i in range(0, 600, 7):
        assert (cache.contains_each(unrelated(i)) == [Presence.PRESENT]) == (i < 300)
        assert (cache.fetch(unrelated(i)) is not None) == (i < 300)
        assert cache.lookup(unrelated(i)).blocks == (i < 300)
    assert not listed, listed
    os.listdir(STORE.root)
    assert listed, "the hook hears nothing"
    looking = False
print("true")
"""


@over("LNT")
def test_looking_and_reading_list_no_directory(store: Store, forge: Forge) -> None:
    assert forge.work(LISTINGS, store) is True


def calls_in(folder: Path) -> set[str]:
    """Names of all methods and keyword arguments that the sources use."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg is not None:
                names.add(node.arg)
    return names


def test_nobody_resizes_an_open_map_or_writes_through_it() -> None:
    used = calls_in(ROOT / "backends" / "lmdb")
    assert {"begin", "map_size", "max_readers"} <= used
    assert not {"set_mapsize", "writemap"} & used


def test_an_l1_that_is_held_refuses_quietly_and_takes_blocks_again(caplog: pytest.LogCaptureFixture) -> None:
    config = {"l1": {"capacity": 8 * (SMALL.nbytes + 8192)}, "l2": []}
    with KVCache.open(config, spec=SMALL, namespace=NAMESPACE) as cache, caplog.at_level(logging.DEBUG):
        n = 0
        while cache.put(unrelated(n), noise(SMALL, [n])) and cache.stats().l1.evictions == 0:  # type: ignore[union-attr]
            n += 1
        held = [lease for i in range(n + 1) if len(lease := cache.acquire(unrelated(i)))]
        caplog.clear()
        began = time.monotonic()
        accepted = [cache.put(unrelated(1000 + i), noise(SMALL, [0])) for i in range(200)]
        assert accepted == [0] * 200
        assert time.monotonic() - began < 20.0  # 0.1 s each
        assert len(caplog.records) <= 10
        held.pop().release()
        assert cache.put(unrelated(5000), noise(SMALL, [5000])) == 1
        for lease in held:
            lease.release()
        assert cache.stats().l1.pinned_blocks == 0  # type: ignore[union-attr]
        assert cache.put(unrelated(5001), noise(SMALL, [5001])) == 1


FLOOD = """
with STORE.open(spec=LARGE) as cache:
    for i in range(int(ARGS[0]), int(ARGS[0]) + int(ARGS[1])):
        cache.put(unrelated(i), noise(LARGE, [i]))
        cache.flush(60)
print("null")
"""


@over("LNT")
def test_what_another_process_evicted_is_a_miss_and_then_absent(store: Store, forge: Forge) -> None:
    forge.work(FLOOD, store, 0, 1)
    with store.open(spec=LARGE) as cache:
        assert cache.contains_each(unrelated(0)) == [Presence.PRESENT]
        forge.work(FLOOD, store, 1000, 100)  # three times the capacity
        assert cache.fetch(unrelated(0)) is None  # whatever is remembered of it
        assert cache.contains_each(unrelated(0)) == [Presence.ABSENT]
        assert cache.tier(TIER).counters.io_errors == 0
        cache.store(unrelated(0), noise(LARGE, [0]))
        found = cache.fetch(unrelated(0))
        assert found is not None
        assert same(found, noise(LARGE, [0]))
