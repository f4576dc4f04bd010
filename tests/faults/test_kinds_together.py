"""Kinds of trouble between processes and threads: a stopped client, maps of two sizes, first uses at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import boto3.session  # type: ignore[import-untyped]
import pytest

from tests.faults.media import server_of
from tests.faults.process import Forge
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, WatchedCache, noise, same, unrelated

CLIENT = """
with STORE.open() as cache:
    print("ready", flush=True)
    i = int(ARGS[0])
    while True:
        cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(60)
        i += 1
"""
BUSY_S = 1.0
"""What a call may take beyond its deadline on a busy machine."""


@over("LNT")
def test_a_client_that_is_stopped_holds_nobody_up(store: Store, forge: Forge) -> None:
    cache = store.open(l1="1MiB", deadline=1.0)
    cache.store(unrelated(0), noise(SMALL, [0]))
    with forge.start(CLIENT, store, 10_000) as other:
        assert other.line() == "ready"
        for n in range(4):  # at whatever it is doing, several times
            time.sleep(0.02 + 0.013 * n)
            os.kill(other.pid, signal.SIGSTOP)
            use(cache, 100 * n)
            if n < 3:
                os.kill(other.pid, signal.SIGCONT)
                assert puts_work_again(cache, 100 * n + 50)
        began = time.monotonic()
        cache.cache.close()
        assert time.monotonic() - began < 5.0 + BUSY_S
        other.kill()
        list(other.lines())
    assert_sound(store)


@over("LNT")
def test_a_client_that_is_killed_holds_nobody_up(store: Store, forge: Forge) -> None:
    with store.open(l1="1MiB", deadline=1.0) as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
        for n in range(4):
            with forge.start(CLIENT, store, 10_000 * (n + 1)) as other:
                assert other.line() == "ready"
                time.sleep(0.02 + 0.013 * n)
                other.kill()
                use(cache, 100 * n)
                list(other.lines())
            assert puts_work_again(cache, 100 * n + 50)
    assert_sound(store)


IN_TRANSACTION = """
import lmdb
with lmdb.open(str(STORE.root), max_dbs=8, map_size=32 << 30, max_readers=1024, create=False) as env:
    txn = env.begin(write=True)
    print("inside", flush=True)
    sys.stdin.readline()
    txn.abort()
    print("null", flush=True)
    sys.stdin.readline()
"""


@over("L")
def test_a_writer_that_stands_still_in_a_transaction_costs_others_their_puts_alone(store: Store, forge: Forge) -> None:
    """There is one writer at a time in a database, whoever it is."""
    cache = store.open(l1="1MiB", deadline=1.0)
    cache.store(unrelated(0), noise(SMALL, [0]))
    with forge.start(IN_TRANSACTION, store) as other:
        assert other.line() == "inside"
        use(cache, 100)
        other.tell("go")
        assert other.line() == "null"
        assert puts_work_again(cache, 150)
        other.kill()
        list(other.lines())
    with forge.start(IN_TRANSACTION, store) as other:
        assert other.line() == "inside"
        use(cache, 200)
        began = time.monotonic()
        cache.cache.close()
        assert time.monotonic() - began < 5.0 + BUSY_S
        other.kill()
        list(other.lines())
    assert_sound(store)


def assert_sound(store: Store) -> None:
    """Whoever comes next finds what was stored and can store."""
    with store.open() as cache:
        found = cache.fetch(unrelated(0))
        assert found is not None
        assert same(found, noise(SMALL, [0]))
        assert puts_work_again(cache, 5000)


def use(cache: WatchedCache, first: int) -> None:
    """Puts and reads, each of which ends in time, whatever becomes of them."""
    for i in range(first, first + 10):
        began = time.monotonic()
        cache.put(unrelated(1 + i), noise(SMALL, [1 + i]))
        cache._state.stack.l1.clear()
        found = cache.fetch(unrelated(0))
        assert time.monotonic() - began < 1.0 + BUSY_S
        assert found is not None, "reads do not wait for writers"
        assert same(found, noise(SMALL, [0]))


def puts_work_again(cache: WatchedCache, i: int) -> bool:
    """Soon: a suspended tier is tried again after a second or two."""
    stored, deadline = cache.tier(TIER).counters.stored, time.monotonic() + 15
    while cache.tier(TIER).counters.stored == stored and time.monotonic() < deadline:
        cache.put(unrelated(i), noise(SMALL, [i]))
        i += 1_000_000
        time.sleep(0.02)
    return bool(cache.tier(TIER).counters.stored > stored)


SMALL_MAP = """
with STORE.open(capacity="16MiB", map_size="48MiB") as cache:
    cache.store(unrelated(0), noise(SMALL, [0]))
    print("ready", flush=True)
    sys.stdin.readline()
    deadline, i, exact = time.monotonic() + 20, 10, 0
    while exact < 5 and time.monotonic() < deadline:
        cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(60)
        found = cache.fetch(unrelated(i))
        assert found is None or same(found, noise(SMALL, [i]))
        exact += found is not None
        i += 1
    found = cache.fetch(unrelated(5000))
    assert found is not None and same(found, noise(SMALL, [5000])), "what the other process wrote last"
print(json.dumps(exact))
"""


@over("L")
def test_processes_with_maps_of_two_sizes_share_a_database(store: Store, forge: Forge) -> None:
    """The file outgrows the map of the one that asked for less."""
    with forge.start(SMALL_MAP, store) as other:
        assert other.line() == "ready"
        with store.open(capacity="128MiB", map_size="1GiB") as cache:
            for i in range(1000, 3000):
                cache.put(unrelated(i), noise(SMALL, [i]))
                if i % 50 == 49:
                    cache.flush(60)
            cache.store(unrelated(5000), noise(SMALL, [5000]))
            assert (store.root / "data.mdb").stat().st_size > 48 << 20
            other.tell("go")
            assert other.result() == 5
            found = cache.fetch(unrelated(2999))
            assert found is not None
            assert same(found, noise(SMALL, [2999]))


CONNECTIONS = 8


@pytest.mark.parametrize("data_path", ["fast", "boto3"])
@over("S")
def test_the_first_uses_of_a_bucket_at_once_share_one_client(
    store: Store, data_path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []
    make = boto3.session.Session.client

    def counted(session: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(session)
        return make(session, *args, **kwargs)

    monkeypatch.setattr(boto3.session.Session, "client", counted)
    threads_n = 32
    barrier, wrong = threading.Barrier(threads_n), list[str]()
    with (
        caplog.at_level(logging.WARNING),
        store.open(data_path=data_path, connections=CONNECTIONS, deadline=20.0) as cache,
    ):

        def first_use(i: int) -> None:
            barrier.wait()
            try:
                cache.put(unrelated(i), noise(SMALL, [i]))
                cache.flush(60)
                for _ in range(3):
                    found = cache.fetch(unrelated(i))
                    if found is None or not same(found, noise(SMALL, [i])):
                        wrong.append(f"{i}: {found is not None}")
            except Exception as e:  # noqa: BLE001 - judged below
                wrong.append(repr(e))

        threads = [threading.Thread(target=first_use, args=(i,)) for i in range(threads_n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert len(made) <= 1, "each thread made a client of its own"
        assert all(session is not getattr(boto3, "DEFAULT_SESSION", None) for session in made)
        connections = {entry.connection for entry in server_of(store).log}
        assert len(connections) <= CONNECTIONS + 4, len(connections)  # and those of opening and listing
    assert [record.getMessage() for record in caplog.records] == []


DEAD_READERS = """
if not os.fork():
    import lmdb
    folder = STORE.root / "index" if STORE.kind == "nvme" else STORE.root
    env = lmdb.open(str(folder), max_dbs=8, map_size=32 << 30, max_readers=1024, create=False)
    held = [env.begin() for _ in range(300)]
    os.kill(os.getpid(), 9)
_, status = os.wait()
assert os.WTERMSIG(status) == 9, status
began = time.monotonic()
with STORE.open() as cache:
    assert same(cache.fetch(unrelated(0)), noise(SMALL, [0]))
    cache.store(unrelated(1), noise(SMALL, [1]))
    assert same(cache.fetch(unrelated(1)), noise(SMALL, [1]))
    counters = cache.tier(TIER).counters
    backend = cache._state.stack.tiers[0].tier.backend
    env = getattr(backend, "_chosen", backend)._session.store.env
    pinned = [line for line in env.readers().splitlines()[1:] if line.split()[-1] != "-"]
print(json.dumps(dict(errors=counters.io_errors, pinned=len(pinned), opened_s=time.monotonic() - began)))
"""


@over("LN")
def test_dead_readers_stop_nobody(store: Store, forge: Forge) -> None:
    with store.open() as cache:
        cache.store(unrelated(0), noise(SMALL, [0]))
        report = forge.work(DEAD_READERS, store)  # while this process uses it: alone one makes the table anew
    assert (report["errors"], report["pinned"]) == (0, 0), report
    assert report["opened_s"] < 5.0 + BUSY_S
