"""A26: little memory, a tiny /dev/shm, no locked memory: told at open with both numbers, or it simply works."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.faults.conftest import Rounds
from tests.faults.process import Forge, run
from tests.faults.store import MIB, Store, over
from tests.faults.test_a06_full_disk import on_small_disk
from tests.support_faults import LARGE

ROOM = 1536 * MIB  # address space left to the process; the index of segment files reserves 1 GiB of it

LIMITED = f"""
import resource
from kvstore.errors import BackendError, ConfigError
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
limit = mapped + {ROOM}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
def told(**options):
    began = time.monotonic()
    try:
        type(STORE)(STORE.root.parent / "other", **STORE.facts()).open(**options).close()
    except (BackendError, ConfigError) as e:
        assert time.monotonic() - began < 2.0
        return f"{{type(e).__name__}}: {{e}}"
    return ""
def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
"""
TOO_LARGE = """
print(json.dumps([limit, told(l1="8GiB"), told(l1="1TiB"), told(l1="16MiB")]))
"""


@over("LNTS")
def test_an_l1_that_the_process_may_not_have_is_told_with_both_numbers(store: Store, forge: Forge) -> None:
    options = {"map_size": "128MiB"} if store.kind == "lmdb" else {}
    code = TOO_LARGE.replace("told(", f"told(**{options!r}, ")
    limit, *said = forge.work(LIMITED + code, store)
    for text, nbytes in zip(said, (8 << 30, 1 << 40), strict=False):
        assert text.startswith("ConfigError"), text
        assert "l1.capacity" in text
        assert str(nbytes) in text
        assert str(limit) in text
    assert said[2] == ""  # and what fits is opened


CHURN = """
options = json.loads(ARGS[0])
refused = told()
with STORE.open(capacity="64MiB", l1="16MiB", **options) as cache:
    before_bytes = peak = anonymous_bytes()
    stored = cache.tier(TIER).counters.stored
    for i in range(int(ARGS[1])):
        cache.put(unrelated(i), noise(SMALL, [i]))
        if i % 50 == 49:
            cache.flush(60)
            found = cache.fetch(unrelated(i))
            assert found is not None and same(found, noise(SMALL, [i]))
            peak = max(peak, anonymous_bytes())
    cache.flush(60)
    counters = cache.tier(TIER).counters
print(json.dumps(dict(refused=refused, grown=peak - before_bytes, stored=counters.stored, errors=counters.io_errors)))
"""


@over("LNT")
def test_churn_far_beyond_the_limit_takes_no_memory_of_its_own(store: Store, forge: Forge, rounds: Rounds) -> None:
    n = rounds(2500, 80_000)  # of 32 KiB, into 64 MiB; the long form is 2.5 GiB
    few = {"map_size": "160MiB"} if store.kind == "lmdb" else {}
    report = forge.work(LIMITED + CHURN, store, json.dumps(few), n)
    assert report["stored"] >= 0.99 * n
    assert report["errors"] == 0
    assert report["grown"] <= (16 + 64) * MIB  # L1, and the memory that reads keep for reuse
    if store.kind == "lmdb":  # the map that is its default needs more address space than there is
        assert "map_size" in report["refused"], report["refused"]
        assert "ulimit" in report["refused"]


TINY_SHM = """
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
mount("-t", "tmpfs", "-o", "size=200m", "tmpfs")
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
with STORE.open(l1="64MiB") as cache:
    for i in range(1000):
        cache.put(unrelated(i), noise(SMALL, [i]))
        if i % 50 == 49:
            cache.flush(60)
    for i in range(0, 1000, 7):
        assert same(cache.fetch(unrelated(i)), noise(SMALL, [i]))
    l1 = cache.stats().l1
    shm = [p.name for p in Path("/dev/shm").iterdir()]
print(json.dumps(dict(resident=l1.resident_bytes, pinned=getattr(l1, "pinned_host_bytes", 0), shm=shm)))
"""


@over("LNT")
def test_neither_shared_nor_locked_memory_is_needed(store: Store, forge: Forge) -> None:
    report = on_small_disk(forge, TINY_SHM, store)
    assert report["resident"] == 1000 * 32 * 1024
    assert report["pinned"] == 0
    assert report["shm"] == []


MANY = """
cache = STORE.open(capacity="64MiB")
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(ARGS[0]), int(ARGS[0]) + int(ARGS[1])):
    cache.put(unrelated(i, LARGE), noise(LARGE, [i]))
    cache.flush(60)
cache.close()
print(json.dumps(True))
"""


@pytest.mark.parametrize("processes", [3])
@over("LNT")
def test_a_capacity_is_of_the_store_however_many_processes_use_it(
    store: Store, forge: Forge, processes: int, rounds: Rounds
) -> None:
    n = rounds(24, 200)  # of 2 MiB each: together far more than 64 MiB
    code = MANY.replace('capacity="64MiB"', 'spec=LARGE, capacity="64MiB"')
    workers = [forge.start(code, store, 1000 * p, n) for p in range(processes)]
    for worker in workers:
        assert worker.line() == "ready"
    for worker in workers:
        worker.tell("go")
    for worker in workers:
        with worker:
            assert worker.result() is True
            assert store.used_bytes() <= store.bound(64 * MIB)
    with store.open(spec=LARGE) as cache:
        assert cache.tier("tier").payload_bytes <= 64 * MIB
        assert cache.tier("tier").records >= 16


LIMIT = 512 * MIB
BEYOND = """
with STORE.open(spec=LARGE, capacity="2GiB") as cache:
    n = int(os.environ["BLOCKS"])
    for i in range(n):
        cache.put(unrelated(i), noise(LARGE, [i]))
        if i % 8 == 7:
            cache.flush(60)
            found = cache.fetch(unrelated(i // 2))
            assert found is not None and same(found, noise(LARGE, [i // 2]))
    cache.flush(60)
    counters = cache.tier(TIER).counters
    file_bytes = cache.tier(TIER).file_bytes
print(json.dumps(dict(stored=counters.stored, errors=counters.io_errors, file_bytes=file_bytes)))
"""


@over("L")
def test_a_store_of_four_times_the_memory_limit_is_written_and_read(store: Store, rounds: Rounds) -> None:
    if not Path("/run/systemd/system").is_dir() or shutil.which("systemd-run") is None or os.geteuid():
        pytest.skip("needs systemd and root to run a process with a memory limit of its own")
    n = rounds(400, 1000)  # 0.8 GB or 2 GB, past a limit of 512 MiB
    limit = ["systemd-run", "--scope", "--quiet", "-p", f"MemoryMax={LIMIT}", "-p", "MemorySwapMax=0"]
    report = run(BEYOND, store, env={"BLOCKS": str(n)}, wrapper=limit, timeout_s=900.0)
    assert report["stored"] == n
    assert report["errors"] == 0
    assert report["file_bytes"] > rounds(1, 3) * LIMIT  # the page cache gave its pages back, and nobody was killed
