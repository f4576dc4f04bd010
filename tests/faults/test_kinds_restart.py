"""Kinds of trouble around opening: network mounts, ghosts of killed processes, large stores, foreign files."""

from __future__ import annotations

import json
import os
import signal
import stat
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvstore_lmdb.directory
import kvstore_nvme.directory
import pytest

from kvstore import BlockSpec, KVCacheKey
from kvstore.errors import BackendUnavailableError
from tests.faults.conftest import Rounds
from tests.faults.media import TreeStore
from tests.faults.process import Forge
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, WatchedCache, noise, same, target, unrelated

TINY = BlockSpec(layers=1, kv_heads=1, head_dim=16, block_tokens=16, dtype="bfloat16")  # 1 KiB


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount table says that everything below is on a network file system."""
    table = tmp_path / "mounts"
    table.write_text(f"server:/x {tmp_path} nfs4 rw 0 0\n")
    for module in (kvstore_lmdb.directory, kvstore_nvme.directory):
        monkeypatch.setattr(module, "_MOUNTS", table)


@pytest.mark.usefixtures("on_nfs")
@over("LNT")
def test_what_a_network_mount_may_tear_is_not_opened_there(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    if isinstance(store, TreeStore):  # made for it: whole files, no map, no locks
        assert_works(store)
        assert caplog.records == []
        return
    with pytest.raises(BackendUnavailableError, match=r"nfs4.*allow_network_fs"):
        store.open()
    assert not store.root.exists() or not list(store.root.iterdir())
    assert_works(store, allow_network_fs=True)
    assert len([r for r in caplog.records if "network file system" in r.getMessage()]) == 1


def assert_works(store: Store, **options: Any) -> None:
    with store.open(**options) as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
        assert cache.fetch(unrelated(0)) is not None


GHOST = """
cache = STORE.open(l1="1MiB")
i = int(ARGS[0])
cache.put(unrelated(i), noise(SMALL, [i]))
cache.flush(30)
named = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line or "(deleted)" in line]
print(json.dumps(named), flush=True)
while True:
    cache.put(unrelated(1000), noise(SMALL, [1000]))
    cache.delete(unrelated(1000))
"""


@over("LNT")
def test_starts_and_kills_leave_no_ghosts(store: Store, forge: Forge, rounds: Rounds) -> None:
    counts = []
    for round_ in range(rounds(8, 20)):
        with forge.start(GHOST, store, 0) as worker:
            assert json.loads(worker.line()) == [], "memory that has a name outlives its process"
            worker.kill()
            list(worker.lines())
            assert worker.exit_code == -signal.SIGKILL
        with store.open() as cache:
            found = cache.fetch(unrelated(0))
            assert found is not None, round_
            assert same(found, noise(SMALL, [0]))
            cache.delete(unrelated(1000))
            until(lambda: not store.strangers())
        counts.append(sum(path.is_file() for path in store.root.rglob("*")))
    assert max(counts) <= counts[0] + 1, counts  # the block under way, at most
    assert store.strangers() == []


def until(law: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not law():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@over("LNT")
def test_a_store_of_many_records_opens_and_answers_at_once(store: Store, rounds: Rounds) -> None:
    n = {"tree": rounds(4_000, 50_000)}.get(store.kind, rounds(20_000, 50_000))
    chain_blocks = 50  # a tree packs 16 blocks into a file, 16, 16, 16 and 2 here
    puts: list[float] = []
    with store.open(spec=TINY, capacity="1GiB", queue="64MiB", l1=None) as cache:
        for first in range(0, n, chain_blocks):
            key = tiny(first, chain_blocks)
            cache.put(key, noise(TINY, [first] * chain_blocks))
            if first % 1000 == 950:
                cache.flush(60)
            if first in {100, n - chain_blocks}:
                puts.append(put_seconds(cache, first))
    early_s, late_s = puts
    assert late_s <= 2 * early_s + 0.005, (early_s, late_s)  # nothing is rewritten that grows with the store
    began = time.monotonic()
    with store.open(spec=TINY, capacity="1GiB") as cache:
        opened_s = time.monotonic() - began
        began = time.monotonic()
        out = target(TINY, chain_blocks)
        assert cache.get(tiny(0, chain_blocks), out) == chain_blocks
        answered_s = time.monotonic() - began
        assert same(out, noise(TINY, [0] * chain_blocks))
    assert opened_s < 2.0 + BUSY_S
    assert answered_s < 0.1 + BUSY_S


BUSY_S = 0.5  # what threads of a busy test machine wait for each other


def tiny(seed: int, n_blocks: int) -> KVCacheKey:
    return KVCacheKey.from_tokens([seed, *range(n_blocks * TINY.block_tokens - 1)], block_tokens=TINY.block_tokens)


def put_seconds(cache: WatchedCache, first: int) -> float:
    """The usual time until a block is stored, at this fill."""
    cache.flush(60)
    took = []
    for i in range(15):
        began = time.perf_counter()
        cache.store(unrelated(10_000_000 + 100 * first + i, TINY), noise(TINY, [i]))
        took.append(time.perf_counter() - began)
    return statistics.median(took)


@over("LNT")
def test_foreign_files_are_neither_read_nor_counted_nor_removed(store: Store) -> None:
    with store.open() as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
    junk = [store.root / name for name in ("README", "aa.tmp", ".hidden", "index.old", "deep/er/file", "data.mdb.old")]
    for path in junk:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(70_000))
    kept = [path.read_bytes() for path in junk]
    with store.open() as cache:
        for i in range(1, 5):
            cache.store(unrelated(i), noise(SMALL, [i]))
        for i in range(5):
            found = cache.fetch(unrelated(i))
            assert found is not None
            assert same(found, noise(SMALL, [i]))
        until(lambda: cache.tier(TIER).records == 5)
        cache.clear()
    assert [path.read_bytes() for path in junk] == kept


@over("T")
def test_a_durable_file_is_on_the_disk_before_it_has_its_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def traced(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            file = name != "fsync" or stat.S_ISREG(os.fstat(args[0]).st_mode)  # directories are synced too
            order.append(name if file else "fsync of a directory")
            return real(*args, **kwargs)

        return call

    with store.open(durability="durable") as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))  # directories are made now
        for name in ("fsync", "link", "replace"):
            monkeypatch.setattr(os, name, traced(name))
        cache.store(unrelated(1), noise(SMALL, [1]))
        monkeypatch.undo()
    published = min(order.index(name) for name in ("link", "replace") if name in order)
    assert "fsync" in order[:published], order
