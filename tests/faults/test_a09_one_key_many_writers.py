"""A09: several processes put the same keys at once, one of them failing now and then; readers see all or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.conftest import Rounds
from tests.faults.media import S3Store, server_of
from tests.faults.process import Forge, Shim, Worker
from tests.faults.s3_faults import Fault as ServerFault
from tests.faults.s3_faults import S3FaultServer
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, Fault, noise, same, unrelated

WRITERS = 4
WRITE = """
with STORE.open() as cache:
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        i = int(line)
        cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(60)
        print(i, flush=True)
    counters = cache.tier(TIER).counters
print(json.dumps(dict(refused=counters.refused_medium, errors=counters.io_errors, stored=counters.stored)), flush=True)
"""
POLL = """
import select
total, seen = int(ARGS[0]), set()
forgetful = {"negative_ttl": 0.0} if STORE.kind == "s3" else {}  # look every time
with STORE.open(**forgetful) as cache:
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for i in range(total):
            there = cache.contains_each(unrelated(i)) == [Presence.PRESENT]
            found = cache.fetch(unrelated(i))
            assert found is None or same(found, noise(SMALL, [i])), f"wrong bytes for u({i})"
            assert found is not None or not there, f"u({i}) was there, then not"
            if found is not None:
                seen.add(i)
            if select.select([sys.stdin], [], [], 0)[0]:
                break
    sys.stdin.readline()
print(json.dumps(len(seen)), flush=True)
"""


def together(
    forge: Forge, store: Store, writers: Sequence[Worker], total: int, before_key: Callable[[int], None]
) -> list[Any]:
    """Let all writers put each key at the same time, while one process reads; returns the writers' reports."""
    with forge.start(POLL, store, total) as poller:
        assert [worker.line() for worker in (*writers, poller)] == ["ready"] * (len(writers) + 1)
        for i in range(total):
            before_key(i)
            for writer in writers:  # nobody starts the next key before all have ended this one
                writer.tell(str(i))
            assert [writer.line() for writer in writers] == [str(i)] * len(writers)
        for writer in writers:
            writer.tell("end")
        reports = [writer.result() for writer in writers]
        poller.tell("end")
        assert poller.result() > 0
    return reports


def assert_whole(store: Store, total: int, reports: Sequence[Any]) -> None:
    """Every key is there once, and only the failing writer noticed anything."""
    assert [report["refused"] for report in reports[:-1]] == [0] * (WRITERS - 1)
    assert [report["errors"] for report in reports[:-1]] == [0] * (WRITERS - 1)
    with store.open() as cache:
        for i in range(total):
            found = cache.fetch(unrelated(i))
            assert found is not None, f"u({i}) was acknowledged by {WRITERS - 1} processes and is gone"
            assert same(found, noise(SMALL, [i])), i
        assert cache.tier(TIER).records in {total, -1}
    assert store.strangers() == []


@over("LNT")
def test_one_key_from_many_processes_is_one_whole_record(
    store: Store, forge: Forge, shim: Shim, tmp_path: Path, rounds: Rounds
) -> None:
    total = rounds(40, 200)
    slow, failing = shim, shim._replace(control=tmp_path / "failing")
    switches = slow.switch, failing.switch

    def before_key(i: int) -> None:
        if i == 0:  # opening is over
            switches[0].set(Fault.SLOW, delay_ms=2)
            switches[1].set(Fault.EIO_WRITE, every=7)

    with contextlib.ExitStack() as stack:
        shims = [*[slow] * (WRITERS - 1), failing]
        writers = [stack.enter_context(forge.start(WRITE, store, shim=one)) for one in shims]
        reports = together(forge, store, writers, total, before_key)
        assert switches[1].injected > 0
    assert_whole(store, total, reports)


@over("S")
def test_one_object_from_many_processes_is_one_whole_record(store: Store, forge: Forge, rounds: Rounds) -> None:
    assert isinstance(store, S3Store)
    total = rounds(40, 200)
    server_of(store).latency_s = 0.002
    with S3FaultServer() as failing, contextlib.ExitStack() as stack:
        failing.buckets = server_of(store).buckets  # the same objects by another way, on which every 7th PUT fails
        failed = ServerFault("error500", methods=("PUT",))
        urls = [store.url] * (WRITERS - 1) + [failing.url]
        writers = [stack.enter_context(forge.start(WRITE, S3Store(store.root, url))) for url in urls]
        reports = together(
            forge, store, writers, total, lambda i: failing.inject(failed) if i % 7 == 6 else failing.inject()
        )
        assert reports[-1]["refused"] + reports[-1]["stored"] <= total
        assert len(failing.requests("PUT")) > total // 2
    assert_whole(store, total, reports)
