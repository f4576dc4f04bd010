"""A08: a write that failed is never visible, gives back what it took, and works when the fault is gone."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

from kvstore.types import Presence
from tests.faults.conftest import Rounds
from tests.faults.media import server_of
from tests.faults.process import Forge, Shim
from tests.faults.s3_faults import Fault as ServerFault
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, Fault, WatchedCache, noise, same, unrelated

# Every case runs in a directory of its own: a good u(1) and u(2), the fault, a new u(0), a put over u(1).
CASES = """
shim = FaultSwitch(Path(ARGS[0]))
def absent_or(cache, i, block):
    found = cache.fetch(unrelated(i))
    assert found is None or same(found, noise(SMALL, [block])), f"wrong bytes for u({i})"
    return found is not None
def put(cache, i, block):
    before = cache.tier(TIER).counters
    cache.store(unrelated(i), noise(SMALL, [block]))
    after = cache.tier(TIER).counters
    gone = [getattr(after, name) - getattr(before, name) for name in ("stored", "already_stored", "refused_medium")]
    assert sum(gone) == 1, (gone, after)
    return ("stored", "there already", "refused")[gone.index(1)]
reports = []
for number, case in enumerate(json.loads(ARGS[1])):
    store = type(STORE)(STORE.root / str(number))
    durability = "durable" if case["fault"] == Fault.EIO_FSYNC else "cache"
    with store.open(durability=durability) as cache:
        cache.store(unrelated(1), noise(SMALL, [1]))
        cache.store(unrelated(2), noise(SMALL, [2]))
        shim.set(Fault(case["fault"]), after=case["after"])
        case["new"] = put(cache, 0, 0)
        case["over"] = put(cache, 1, 1)
        case["injected"] = shim.injected
        shim.off()
        case["visible"] = absent_or(cache, 0, 0)
        case["old"] = absent_or(cache, 1, 1)
        case["neighbour"] = absent_or(cache, 2, 2)
        counters = cache.tier(TIER).counters
        case["counted"] = counters.io_errors + counters.timeouts
        case["refused"] = counters.refused_medium
        case["evicted"] = counters.evicted
        case["strangers"] = store.strangers()
        deadline = time.monotonic() + 5
        again = put(cache, 0, 0)
        while again == "refused" and time.monotonic() < deadline:  # a suspended tier tries again after a second
            time.sleep(0.05)
            again = put(cache, 0, 0)
        case["again"] = again
        assert absent_or(cache, 0, 0), case
        there = sum(absent_or(cache, i, i) for i in range(3))
        deadline = time.monotonic() + 3
        while cache.tier(TIER).records != there and time.monotonic() < deadline:
            time.sleep(0.05)
        assert cache.tier(TIER).records == there, (there, case)
    with store.open(durability=durability) as cache:
        case["restarted"] = [absent_or(cache, i, i) for i in range(3)]
        case["records"] = cache.tier(TIER).records
    reports.append(case)
print(json.dumps(reports))
"""
KILLED = """
shim = FaultSwitch(Path(ARGS[0]))
for fault, durability in json.loads(ARGS[1]):
    if not os.fork():  # in a process that ends without a close that could tidy up
        cache = type(STORE)(STORE.root / str(fault)).open(durability=durability)
        cache.store(unrelated(1), noise(SMALL, [1]))
        shim.set(Fault(fault))
        cache.store(unrelated(0), noise(SMALL, [0]))
        os._exit(0 if cache.tier(TIER).counters.refused_medium == 1 else 3)
    _, status = os.wait()
    shim.off()
    assert status == 0, (fault, status)
"""
WRITE_FAULTS = [
    Fault.ENOSPC, Fault.EIO_WRITE, Fault.SHORT_WRITE, Fault.EIO_FSYNC, Fault.EXDEV_RENAME, Fault.EMFILE, Fault.EROFS
]  # fmt: skip
AFTER = [0, 1, 2, 5]
QUICK = 2  # of them, unless it is a soak
HARMLESS = {"lmdb": set(), "nvme": set(), "tree": {Fault.SHORT_WRITE}}
"""Faults that a writer must get over by itself; liblmdb gives up a transaction whose write came back short."""

MAY_SHOW = {("lmdb", Fault.EIO_FSYNC)}
"""Refused, because it is not known to be on the medium, yet readable: to take it back would need a sync as well."""


@over("LNT")
def test_a_failed_write_is_invisible_and_gives_back_what_it_took(
    store: Store, forge: Forge, shim: Shim, rounds: Rounds
) -> None:
    after = AFTER[: rounds(QUICK, len(AFTER))]
    cases = [{"fault": int(f), "after": n} for f, n in itertools.product(WRITE_FAULTS, after)]
    reports = forge.work(CASES, store, shim.control, json.dumps(cases), shim=shim)
    assert len(reports) == len(cases)
    for report in reports:
        judge_case(report, harmless=report["fault"] in HARMLESS[store.kind])
        if (store.kind, report["fault"]) not in MAY_SHOW:
            assert report["visible"] == (report["new"] == "stored"), report
    met = {report["fault"] for report in reports if report["injected"]}
    assert {Fault.ENOSPC, Fault.EIO_WRITE, Fault.SHORT_WRITE, Fault.EROFS} <= met, met


def judge_case(report: dict[str, Any], *, harmless: bool) -> None:
    evicted_for_room = report["fault"] == Fault.ENOSPC and report["evicted"] > 0
    failed = report["injected"] and not harmless
    if report["after"] == 0 and failed:
        assert report["new"] == "refused", report
    if not failed:
        assert report["new"] == "stored", report
        assert report["over"] == "there already", report
    assert report["visible"] or report["new"] != "stored", report
    if not evicted_for_room:
        assert report["old"], report
        assert report["neighbour"], report
    assert report["strangers"] == [], report
    assert report["again"] in {"stored", "there already"}, report
    assert report["restarted"] == [True, report["old"] or report["over"] == "stored", report["neighbour"]], report
    assert report["records"] == sum(report["restarted"]), report
    refusals = [report["new"], report["over"]].count("refused")
    assert report["refused"] >= refusals, report
    assert report["counted"] <= report["injected"], report


@over("LNT")
def test_a_refused_write_does_not_come_back_after_a_kill(store: Store, forge: Forge, shim: Shim) -> None:
    cases = [(Fault.EIO_WRITE, "cache"), (Fault.EIO_FSYNC, "durable"), (Fault.ENOSPC, "cache")]
    forge.work(KILLED, store, shim.control, json.dumps(cases), shim=shim)
    for fault, durability in cases:
        with type(store)(store.root / str(int(fault))).open(durability=durability) as cache:
            assert cache.fetch(unrelated(0)) is None, fault.name
            cache.store(unrelated(0), noise(SMALL, [0]))
            found = cache.fetch(unrelated(0))
            assert found is not None
            assert same(found, noise(SMALL, [0]))


READ_FAULTS = """
shim = FaultSwitch(Path(ARGS[0]))
reports = {}
for fault in map(int, ARGS[1:]):
    with type(STORE)(STORE.root / str(fault)).open() as cache:
        for i in range(8):
            cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(60)
        shim.set(Fault(fault))
        during = []
        for i in range(8):
            found = cache.fetch(unrelated(i))
            assert found is None or same(found, noise(SMALL, [i]))
            during.append(found is not None)
        injected = shim.injected
        shim.off()
        deadline = time.monotonic() + 5
        while cache.fetch(unrelated(0)) is None:  # a suspended tier is asked again after a second
            assert time.monotonic() < deadline, "reads did not come back"
            time.sleep(0.05)
        for i in range(8):
            found = cache.fetch(unrelated(i))
            assert found is not None and same(found, noise(SMALL, [i])), f"u({i}) was lost by a passing error"
        counters = cache.tier(TIER).counters
    reports[fault] = dict(during=during, injected=injected, corrupt=counters.corrupt, counted=counters.io_errors)
print(json.dumps(reports))
"""


@over("LNT")
def test_a_passing_read_error_loses_no_entry(store: Store, forge: Forge, shim: Shim) -> None:
    faults = [Fault.EIO_READ, Fault.SHORT_READ, Fault.EMFILE]
    reports = forge.work(READ_FAULTS, store, shim.control, *map(int, faults), shim=shim)
    for fault in faults:
        report = reports[str(int(fault))]
        assert report["corrupt"] == 0, fault.name
        if fault is Fault.SHORT_READ or not report["injected"]:
            assert all(report["during"]), fault.name
        else:
            assert not all(report["during"]), fault.name
            assert report["counted"] > 0, fault.name


SHORT = """
shim = FaultSwitch(Path(ARGS[0]))
with STORE.open() as cache:
    cache.store(unrelated(100), noise(SMALL, [100]))
    shim.set(Fault.SHORT_WRITE)
    for i in range(8):
        cache.store(unrelated(i), noise(SMALL, [i]))
    written_short = shim.injected
    shim.set(Fault.SHORT_READ)
    for i in range(8):
        assert same(cache.fetch(unrelated(i)), noise(SMALL, [i]))
    read_short = shim.injected
    shim.off()
    stored = cache.tier(TIER).counters.stored
print(json.dumps(dict(written_short=written_short, read_short=read_short, stored=stored)))
"""


@over("N")
def test_short_transfers_of_segments_are_gone_on_with(store: Store, forge: Forge, shim: Shim) -> None:
    report = forge.work(SHORT, store, shim.control, shim=shim._replace(prefix=store.root / "seg-0000"))
    assert report["written_short"] > 0
    assert report["read_short"] > 0
    assert report["stored"] == 9


@over("S")
def test_a_put_that_the_server_fails_is_invisible_and_works_again(store: Store) -> None:
    server = server_of(store)
    for after in AFTER:
        with store.open(pack=1) as cache:
            cache.store(unrelated(1), noise(SMALL, [1]))
            server.log.clear()
            requests = 0
            server.inject(ServerFault("error500", methods=("PUT",)))
            for i in range(100, 100 + after + 1):
                cache.store(unrelated(i), noise(SMALL, [i]))
                requests += len(server.requests("PUT", unrelated(i)[0].hex()))
                assert cache.contains_each(unrelated(i)) == [Presence.ABSENT]
                assert cache.fetch(unrelated(i)) is None
            assert cache.tier(TIER).counters.refused_medium == after + 1
            assert requests <= 2 * (after + 1)  # at most one attempt more, no storm
            server.inject()
            found = cache.fetch(unrelated(1))
            assert found is not None
            assert same(found, noise(SMALL, [1]))
            assert_stored_again(cache, 100)
        with store.open(pack=1) as cache:
            found = cache.fetch(unrelated(100))
            assert found is not None
            assert same(found, noise(SMALL, [100]))
            assert store.strangers() == []
            cache.clear()


def assert_stored_again(cache: WatchedCache, i: int) -> None:
    """A suspended tier tries again after a second or two."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        cache.store(unrelated(i), noise(SMALL, [i]))
        found = cache.fetch(unrelated(i))
        if found is not None:
            assert same(found, noise(SMALL, [i]))
            return
        time.sleep(0.05)
    raise AssertionError("writes did not come back")
