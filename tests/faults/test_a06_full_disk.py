"""A06: full, read-only and inode-less disks: puts are refused, gets go on, and the store heals by itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.process import Forge
from tests.faults.store import Store, over

# The worker gets a mount table of its own, for which no rights are needed, and a small disk in it.
PRELUDE = """
import ctypes, subprocess
from kvstore.errors import BackendError
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
uid, gid = os.getuid(), os.getgid()
if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNS):
    print(json.dumps({"skip": os.strerror(ctypes.get_errno())}), flush=True)
    os._exit(0)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
disk = STORE.root.parent / "disk"
disk.mkdir()
def mount(*args):
    subprocess.run(["mount", *args, str(disk)], check=True)
STORE = type(STORE)(disk / "store")
foreign = disk / "foreign"
def outcome(cache, key, block):
    before = cache.tier(TIER).counters
    cache.store(key, block)
    after = cache.tier(TIER).counters
    assert after.stored - before.stored + after.refused_medium - before.refused_medium == 1, after
    return after.stored - before.stored == 1
"""


def on_small_disk(forge: Forge, code: str, store: Store) -> Any:
    report = forge.work(PRELUDE + code, store)
    if "skip" in report:
        pytest.skip(f"needs a mount table of its own for a small disk: {report['skip']}")
    return report


FULL = """
mount("-t", "tmpfs", "-o", "size=16m", "tmpfs")
foreign.write_bytes(bytes(8 * MIB))
with STORE.open(spec=LARGE) as cache:
    stored = [outcome(cache, unrelated(i), noise(LARGE, [i])) for i in range(20)]
    there = []
    for i in range(20):
        found = cache.fetch(unrelated(i))
        assert found is None or same(found, noise(LARGE, [i])), i
        there.append(found is not None)
    full = cache.tier(TIER)
    foreign.unlink()
    healed = [outcome(cache, unrelated(100 + i), noise(LARGE, [100 + i])) for i in range(10)]
    used = STORE.used_bytes()
    late = sum(same(found, noise(LARGE, [100 + i])) for i in range(10)
               if (found := cache.fetch(unrelated(100 + i))) is not None)
print(json.dumps(dict(stored=stored, there=there, evicted=full.counters.evicted, healed=healed, used=used, late=late)))
"""


@over("LNT")
def test_a_disk_that_fills_up_refuses_then_heals(store: Store, forge: Forge) -> None:
    report = on_small_disk(forge, FULL, store)
    assert not all(report["there"])  # 40 MiB do not fit into 8
    assert not [i for i in range(20) if report["there"][i] and not report["stored"][i]]
    assert any(report["there"])
    assert sum(report["stored"][-10:]) >= 7, report
    assert report["evicted"] > 0
    assert sum(report["healed"]) >= 9, report
    assert report["used"] > 8 << 20
    assert report["late"] >= 5


NO_ROOM = """
mount("-t", "tmpfs", "-o", "size=16m", "tmpfs")
with foreign.open("wb", buffering=0) as f:
    for step in (MIB, 4096):
        try:
            while f.write(bytes(step)):
                pass
        except OSError:
            pass
start = time.monotonic()
try:
    STORE.open(spec=LARGE).close()
    told = ""
except BackendError as e:
    told = str(e)
below = [{"backend": "memory", "name": "below"}]
with STORE.open(spec=LARGE, required=False, below=below) as cache:
    opened_s = time.monotonic() - start
    state = cache.health().state
    cache.store(unrelated(0), noise(LARGE, [0]))
    assert same(cache.fetch(unrelated(0)), noise(LARGE, [0]))  # from the other tier
    foreign.unlink()
    time.sleep(1.0)
    cache.store(unrelated(1), noise(LARGE, [1]))
    tiers = {t.name: t.counters.stored for t in cache.stats().tiers}
    healed = tiers.get(TIER, 0)
with STORE.open(spec=LARGE) as cache:
    stored = outcome(cache, unrelated(2), noise(LARGE, [2]))
    assert same(cache.fetch(unrelated(2)), noise(LARGE, [2]))
print(json.dumps(dict(told=told, opened_s=opened_s, state=state, healed=healed, stored=stored)))
"""


@over("LNT")
def test_a_store_without_room_to_begin_is_told_at_open(store: Store, forge: Forge) -> None:
    report = on_small_disk(forge, NO_ROOM, store)
    assert report["opened_s"] < 5
    assert report["state"] == "degraded"
    assert report["stored"]
    if report["told"]:  # refused at open: said so with the place and the reason
        assert "disk" in report["told"]
        assert ("space" in report["told"]) or ("full" in report["told"])
    else:
        assert report["healed"] == 1


NO_INODES = """
mount("-t", "tmpfs", "-o", "nr_inodes=50", "tmpfs")
with STORE.open() as cache:
    stored = [outcome(cache, unrelated(i), noise(SMALL, [i])) for i in range(200)]
    there = [cache.fetch(unrelated(i)) for i in range(200)]
    for i, found in enumerate(there):
        assert found is None or same(found, noise(SMALL, [i])), i
print(json.dumps(dict(stored=stored, there=[found is not None for found in there])))
"""


@over("LNT")
def test_a_disk_without_inodes_refuses_then_heals(store: Store, forge: Forge) -> None:
    report = on_small_disk(forge, NO_INODES, store)
    assert not [i for i in range(200) if report["there"][i] and not report["stored"][i]]
    assert any(report["there"])
    assert sum(report["stored"][-20:]) >= 14, report["stored"]


READ_ONLY = """
mount("-t", "tmpfs", "-o", "size=64m", "tmpfs")
with STORE.open() as cache:
    for i in range(10):
        cache.put(unrelated(i), noise(SMALL, [i]))
    cache.flush(60)
mount("-o", "remount,ro")
with STORE.open() as cache:
    for i in range(10):
        assert same(cache.fetch(unrelated(i)), noise(SMALL, [i]))
    refused = [not outcome(cache, unrelated(100 + i), noise(SMALL, [100 + i])) for i in range(20)]
    detail = cache.health().tiers[TIER].detail
    for i in range(10):
        assert same(cache.fetch(unrelated(i)), noise(SMALL, [i]))
    mount("-o", "remount,rw")
    deadline = time.monotonic() + 5
    i = 200
    while not outcome(cache, unrelated(i), noise(SMALL, [i])):
        assert time.monotonic() < deadline, "writes did not come back"
        time.sleep(0.1)
        i += 1
    assert same(cache.fetch(unrelated(i)), noise(SMALL, [i]))
    failures = cache.tier(TIER).counters.io_errors
print(json.dumps(dict(refused=refused, detail=detail, failures=failures)))
"""


@over("LNT")
def test_a_read_only_mount_serves_refuses_and_writes_again(store: Store, forge: Forge) -> None:
    report = on_small_disk(forge, READ_ONLY, store)
    assert all(report["refused"])
    assert "read_only" in report["detail"] or "read-only" in report["detail"]
    assert report["failures"] <= 5  # no storm of attempts
