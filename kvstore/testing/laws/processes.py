"""Laws about other processes: sharing, kills, forks."""

from __future__ import annotations

import time
from typing import ClassVar, Final

import pytest

from kvstore.backend import Backend, Capability
from kvstore.testing.laws.deletes import eventually
from kvstore.testing.neighbour import NeighbourError
from kvstore.testing.samples import STORED, bytes_of, call, item_of, names_of, put, put_all, read
from kvstore.testing.store import Store
from kvstore.types import Presence

_KILLED: Final = 30_000  # bytes of a record that is killed in the middle: several pages and syscalls
_STATUSES: Final = frozenset(status.value for status in STORED)


class ProcessLaws:
    """Several processes on one place, at once or one after the other."""

    absence_age_s: ClassVar[float] = 0.0
    """How long an absence may be remembered although another process has put the record meanwhile."""

    epoch_age_s: ClassVar[float]
    small_capacity_bytes: ClassVar[int]
    record_bytes: ClassVar[int]

    def test_another_process_reads_what_was_stored_before(self, store: Store) -> None:
        with store.opened() as backend:
            put_all(backend, [item_of(i) for i in range(5)])
            epoch = backend.epoch(b"a" * 16)
        expected = [bytes_of(i, 5000) if store.has(Capability.PERSISTENT) else None for i in range(5)]
        with store.neighbour() as other:
            assert other.read(names_of(range(5))) == expected
            assert (other.epoch(b"a" * 16) == epoch) is store.has(Capability.PERSISTENT)

    def test_two_processes_share_one_store_at_once(self, backend: Backend, store: Store) -> None:
        put_all(backend, [item_of(i) for i in range(4)])
        backend.exists_many(names_of(["theirs"]), call())  # a remembered absence must not outlive their put
        try:
            other = store.neighbour()
        except NeighbourError:
            assert not store.has(Capability.SHARED), "SHARED is declared, but a second process cannot open the store"
            return
        if not store.has(Capability.SHARED):
            assert other.read(names_of(range(4))) == [None] * 4
            return
        assert other.read(names_of(range(4))) == [bytes_of(i, 5000) for i in range(4)]
        assert set(other.put(["theirs", 0])) <= _STATUSES
        theirs = [bytes_of("theirs", 5000)]
        assert eventually(lambda: read(backend, names_of(["theirs"])) == theirs, self.absence_age_s)
        assert backend.exists_many(names_of(["theirs"]), call()) == [Presence.PRESENT]
        assert other.delete(names_of([0, 1])) == 2
        assert read(backend, names_of(range(4))) == [None, None, bytes_of(2, 5000), bytes_of(3, 5000)]

    def test_a_bump_reaches_other_processes(self, backend: Backend, store: Store) -> None:
        if not store.has(Capability.SHARED):
            return
        with store.neighbour() as other:
            assert other.epoch(b"a" * 16) == backend.epoch(b"a" * 16)
            bumped = other.epoch(b"a" * 16, bump=True)
            assert eventually(lambda: backend.epoch(b"a" * 16) == bumped, self.epoch_age_s)

    def test_nothing_is_lost_when_two_processes_write(self, backend: Backend, store: Store) -> None:
        if not store.has(Capability.SHARED):
            return
        mine, theirs = [f"mine {i}" for i in range(40)], [f"theirs {i}" for i in range(40)]
        with store.neighbour() as other:
            for start in range(0, 40, 10):
                other.tell("put", ids=[*theirs[start : start + 10], f"both {start}"], nbytes=5000)
                put_all(backend, [item_of(i) for i in [*mine[start : start + 10], f"both {start}"]])
                assert set(other.answer()) <= _STATUSES
            everything = [*mine, *theirs, *(f"both {start}" for start in range(0, 40, 10))]
            expected = [bytes_of(i, 5000) for i in everything]
            assert read(backend, names_of(everything)) == expected
            assert other.read(names_of(everything)) == expected

    @pytest.mark.parametrize(("acknowledged", "later_s"), [(1, 0.0), (4, 0.004), (9, 0.015)])
    def test_a_killed_writer_leaves_whole_records(self, store: Store, acknowledged: int, later_s: float) -> None:
        if not store.has(Capability.PERSISTENT):
            return
        writer = store.neighbour()
        writer.tell("put_for_ever", nbytes=_KILLED, batch=4)
        answers = [writer.answer() for _ in range(acknowledged)]
        time.sleep(later_s)  # into some later call
        answers += writer.kill()
        safe = answers[-1][1]
        assert writer.process.returncode == -9
        backend = store.open()
        found = read(backend, names_of(range(safe + 400)))
        assert found[:safe] == [bytes_of(i, _KILLED) for i in range(safe)]
        assert all(data in (None, bytes_of(i, _KILLED)) for i, data in enumerate(found))
        put_all(backend, [item_of(i, _KILLED) for i in range(safe, safe + 8)])
        assert None not in read(backend, names_of(range(safe + 8)))

    def test_a_fork_uses_nothing_of_the_parents(self, store: Store) -> None:
        with store.neighbour() as parent:
            parent.put(["forked"])
            answers = parent.ask("fork", ident="forked", nbytes=5000)
            assert "died" not in answers, answers
            assert answers["inherited"] in {"closed", "good"}
            if store.has(Capability.SHARED):
                assert answers["new"] == "good"
            assert answers["own"] == "good"
            assert set(parent.put(["after"])) <= _STATUSES

    def test_eviction_is_counted_once_for_all_processes(self, store: Store) -> None:
        if not store.has(Capability.SHARED | Capability.EVICTS):
            return
        capacity = self.small_capacity_bytes
        backend = store.open(capacity_bytes=capacity)
        count = capacity // self.record_bytes
        with store.neighbour(capacity_bytes=capacity) as other:
            for start in range(0, count, 8):
                ids = [f"theirs {i}" for i in range(start, start + 8)]
                other.tell("put", ids=ids, nbytes=self.record_bytes)
                put(backend, *[item_of(f"mine {i}", self.record_bytes) for i in range(start, start + 8)])
                assert set(other.answer()) <= {*_STATUSES, "full"}
                for usage in (vars_of(backend), other.ask("usage")):
                    assert usage["payload_bytes"] <= capacity
            assert backend.usage().records <= count
            names = names_of([f"{whose} {i}" for whose in ("mine", "theirs") for i in range(count)])
            here = [presence is Presence.PRESENT for presence in backend.exists_many(names, call())]
            assert [data is not None for data in read(backend, names)] == here
            assert backend.usage().records == other.ask("usage")["records"] == sum(here)


def vars_of(backend: Backend) -> dict[str, int]:
    """Usage in the form of the other process's answer."""
    usage = backend.usage()
    return {"records": usage.records, "payload_bytes": usage.payload_bytes, "capacity_bytes": usage.capacity_bytes}
