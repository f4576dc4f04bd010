"""Kinds of trouble with failing tiers: fast errors, probes that lie, calls a file system lacks, descriptors of errors."""

from __future__ import annotations

import json
import time

import pytest

from kvstore import BlockStatus
from kvstore.types import Presence
from tests.faults.conftest import Rounds
from tests.faults.media import server_of
from tests.faults.process import Forge, Shim
from tests.faults.s3_faults import Fault as ServerFault
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, Fault, noise, same, target, unrelated

FAST_ERRORS = """
shim = FaultSwitch(Path(ARGS[0]))
with STORE.open() as cache:
    cache.store(unrelated(0), noise(SMALL, [0]))
    shim.set(Fault.EIO_WRITE)
    began = time.monotonic()
    for i in range(1, 21):
        cache.store(unrelated(i), noise(SMALL, [i]))
    first = shim.injected
    for i in range(21, 121):
        cache.store(unrelated(i), noise(SMALL, [i]))
    later, took_s = shim.injected - first, time.monotonic() - began
    failed = cache.tier(TIER).counters
    state = cache.health().state
    assert same(cache.fetch(unrelated(0)), noise(SMALL, [0])), "reads go on"
    shim.off()
    deadline = time.monotonic() + 10
    while cache.fetch(unrelated(500)) is None:
        assert time.monotonic() < deadline, "writes did not come back"
        cache.store(unrelated(500), noise(SMALL, [500]))
        time.sleep(0.05)
    healed = cache.health().state
print(json.dumps(dict(first=first, later=later, took_s=took_s, io_errors=failed.io_errors, refused=failed.refused_medium,
                      rejected=failed.rejected_by_breaker, state=state, healed=healed)))
"""


@over("LNT")
def test_a_tier_that_fails_at_once_is_suspended_as_one_that_hangs(store: Store, forge: Forge, shim: Shim) -> None:
    report = forge.work(FAST_ERRORS, store, shim.control, shim=shim)
    assert report["refused"] == 120, report
    probes = 2 + report["took_s"]  # at most one a second once it is suspended
    assert report["io_errors"] <= 5 + probes, report
    assert report["rejected"] >= 120 - 5 - probes - 1, report
    assert report["first"] > 0, report
    assert report["later"] <= 4 * probes, report  # a few system calls each
    assert report["state"] == "degraded"
    assert report["healed"] == "ok"


@over("S")
def test_a_server_that_answers_looks_and_no_reads_is_unhealthy_soon(store: Store) -> None:
    """A ping would say that all is well."""
    with store.open(positive_ttl=0.0, negative_ttl=0.0) as cache:
        for i in range(30):
            cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(60)
        with server_of(store).faulty(ServerFault("error500", methods=("GET",))):
            operations = 0
            while cache.health().tiers[TIER].state == "ok":
                i = operations % 30
                assert cache.contains_each(unrelated(i))[0] in {Presence.PRESENT, Presence.UNKNOWN}
                assert cache.get_each(unrelated(i), target(SMALL)) == [BlockStatus.UNAVAILABLE]
                operations += 1
                assert operations < 20, "looks that succeed hide reads that fail"
            assert cache.health().state in {"degraded", "down"}
        deadline = time.monotonic() + 10
        while cache.fetch(unrelated(0)) is None:
            assert time.monotonic() < deadline, "reads did not come back"
            time.sleep(0.05)
        assert cache.health().tiers[TIER].state == "ok"


@over("S")
def test_every_failed_request_is_counted_where_it_failed(store: Store) -> None:
    with store.open(attempts=1, positive_ttl=0.0, negative_ttl=0.0, **store.alone()) as cache:
        for i in range(4):
            cache.store(unrelated(i), noise(SMALL, [i]))
        for failures in range(1, 5):  # below the five that suspend a tier
            only = unrelated(failures - 1)[0].hex()
            with server_of(store).faulty(ServerFault("error500", methods=("GET",), times=1, only=only)):
                before = cache.tier(TIER).counters.io_errors
                assert cache.fetch(unrelated(failures - 1)) is None
                assert cache.tier(TIER).counters.io_errors == before + 1
            found = cache.fetch(unrelated(failures - 1))
            assert found is not None
            assert same(found, noise(SMALL, [failures - 1]))
        assert cache.tier(TIER).counters.rejected_by_breaker == 0


WITHOUT = """
shim = FaultSwitch(Path(ARGS[0]))
shim.set(Fault(int(ARGS[1])))
with STORE.open() as cache:
    for i in range(8):
        cache.put(unrelated(i), noise(SMALL, [i]))
    cache.flush(60)
    for i in range(8):
        assert same(cache.fetch(unrelated(i)), noise(SMALL, [i])), i
    counters = cache.tier(TIER).counters
    facts = cache._state.stack.tiers[0].tier.backend.describe()
print(json.dumps(dict(stored=counters.stored, errors=counters.io_errors, injected=shim.injected, io=facts.get("io", ""))))
"""


@pytest.mark.parametrize(
    "fault", [Fault.EOPNOTSUPP_FALLOCATE, Fault.EINVAL_DIRECT_OPEN, Fault.EINVAL_DIRECT_IO], ids=lambda f: f.name
)
@over("LNT")
def test_calls_that_a_file_system_lacks_are_done_without(store: Store, forge: Forge, shim: Shim, fault: Fault) -> None:
    report = forge.work(WITHOUT, store, shim.control, int(fault), shim=shim)
    assert (report["stored"], report["errors"]) == (8, 0), report
    if store.kind == "nvme":
        assert report["injected"] > 0, "the store does not use what is missing here"
        assert (report["io"] == "direct") == (fault is Fault.EOPNOTSUPP_FALLOCATE), report


DESCRIPTORS = """
n = int(ARGS[0])
def held():
    import gc
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
with STORE.open(**({"negative_ttl": 0.0} if STORE.kind == "s3" else {}), **STORE.alone()) as cache:
    for i in range(20):
        cache.put(unrelated(i), noise(SMALL, [i]))
    cache.flush(60)
    def misses(count):
        for i in range(count):
            assert cache.fetch(unrelated(10_000 + i)) is None
    def damaged(count):
        for i in range(count):
            place = STORE.at(unrelated(i % 20))
            value = STORE.read(place)
            STORE.write(place, value[:-1] + bytes([value[-1] ^ 1]))
            assert cache.fetch(unrelated(i % 20)) is None
            cache.store(unrelated(i % 20), noise(SMALL, [i % 20]))
    def deletes(count):
        for i in range(count):
            assert cache.delete(unrelated(5000 + i)) == 0
    kinds = [misses, deletes] + ([] if STORE.kind == "s3" else [damaged])
    for kind in kinds:
        kind(5)
    before = held()
    counts = {}
    for kind in kinds:
        kind(n if kind is misses else n // 10)
        counts[kind.__name__] = held() - before
print(json.dumps(counts))
"""


@over("LNTS")
def test_misses_and_damage_keep_no_descriptor(store: Store, forge: Forge, rounds: Rounds) -> None:
    counts = forge.work(DESCRIPTORS, store, rounds(400, 10_000))
    assert set(counts) >= {"misses", "deletes"}
    assert max(counts.values()) <= 2, json.dumps(counts)  # a listing of upkeep may be open at that moment


FAILED_PUTS = """
shim = FaultSwitch(Path(ARGS[0]))
with STORE.open() as cache:
    cache.store(unrelated(0), noise(SMALL, [0]))
    before = len(os.listdir("/proc/self/fd"))
    refused = 0
    for i in range(1, 1 + int(ARGS[1])):
        shim.set(Fault.EIO_WRITE if i % 4 else Fault.OFF)  # a success now and then: the tier is never suspended
        cache.store(unrelated(i), noise(SMALL, [i]))
    shim.off()
    counters = cache.tier(TIER).counters
    after = len(os.listdir("/proc/self/fd"))
print(json.dumps(dict(refused=counters.refused_medium, rejected=counters.rejected_by_breaker, kept=after - before)))
"""


@over("LNT")
def test_failed_puts_keep_no_descriptor(store: Store, forge: Forge, shim: Shim, rounds: Rounds) -> None:
    n = rounds(60, 1000)
    report = forge.work(FAILED_PUTS, store, shim.control, n, shim=shim)
    assert report["refused"] >= n // 2, report
    assert report["rejected"] == 0, report
    assert report["kept"] <= 2, report
