"""Laws about opening and closing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvstore.backend import Backend, Capability
from kvstore.errors import BackendPermissionError, ClosedError, KVStoreError
from kvstore.testing.laws.deletes import eventually
from kvstore.testing.samples import Received, bytes_of, call, item_of, name_of, names_of, put, put_all, read
from kvstore.testing.store import Store
from kvstore.types import PutStatus, ReadStatus

_CLOSE_S: Final = 5.0
_COUNT_S: Final = 10.0
_FDS: Final = Path("/proc/self/fd")

_CALLS: Final[dict[str, Callable[[Backend], object]]] = {
    "get_many": lambda backend: backend.get_many([name_of(0)], Received(), call()),
    "read_many": lambda backend: backend.read_many([name_of(0)], lambda _i, _info: None, lambda _i: None, call()),
    "get_ranges": lambda backend: backend.get_ranges([name_of(0)], [(0, 1)], Received(), call()),
    "put_many": lambda backend: put(backend, item_of(0)),
    "exists_many": lambda backend: backend.exists_many([name_of(0)], call()),
    "delete_many": lambda backend: backend.delete_many([name_of(0)], call()),
    "discard": lambda backend: backend.discard(name_of(0), 0),
    "epoch": lambda backend: backend.epoch(bytes(16)),
    "usage": lambda backend: backend.usage(),
}
_HARMLESS: Final[dict[str, Callable[[Backend], object]]] = {
    "touch_many": lambda backend: backend.touch_many([name_of(0)]),
    "drop": lambda backend: backend.drop(name_of(0)),
    "maintain": lambda backend: backend.maintain(),
    "describe": lambda backend: backend.describe(),
}


def residue() -> tuple[int, int]:
    """Threads and open files of this process; 0 files where /proc does not tell."""
    return threading.active_count(), len(list(_FDS.iterdir())) if _FDS.is_dir() else 0


class LifecycleLaws:
    """Open, close, open again, open to read."""

    def test_close_may_be_called_again(self, store: Store) -> None:
        backend = store.open()
        backend.close()
        backend.close()
        store.make().close()

    def test_use_after_close_raises_closed_error(self, store: Store) -> None:
        backend = store.open()
        put(backend, item_of(0))
        backend.close()
        calls = {**_CALLS, "scan": lambda b: list(b.scan())} if store.has(Capability.SCAN) else _CALLS
        assert [operation for operation, work in calls.items() if _outcome(work, backend) != "ClosedError"] == []

    def test_use_before_open_raises_closed_error(self, store: Store) -> None:
        calls = _CALLS.items()
        assert [operation for operation, work in calls if _outcome(work, store.make()) != "ClosedError"] == []

    def test_upkeep_after_close_does_nothing_or_raises_closed_error(self, store: Store) -> None:
        backend = store.open()
        backend.close()
        outcomes = {operation: _outcome(work, backend) for operation, work in _HARMLESS.items()}
        assert set(outcomes.values()) <= {"", "ClosedError"}, outcomes

    def test_records_survive_a_reopen_where_that_is_declared(self, store: Store) -> None:
        with store.opened() as backend:
            put_all(backend, [item_of(i, 4000 + i) for i in range(20)])
            epoch = backend.epoch(bytes(range(16)))
        reopened = store.open()
        found = read(reopened, names_of(range(20)))
        if store.has(Capability.PERSISTENT):
            assert found == [bytes_of(i, 4000 + i) for i in range(20)]
            assert reopened.epoch(bytes(range(16))) == epoch
            assert eventually(lambda: _counted(reopened) == 20, _COUNT_S)
            reopened.delete_many(names_of(range(10)), call())
            reopened.close()
            assert read(store.open(), names_of(range(20)))[:10] == [None] * 10
        else:
            assert found == [None] * 20

    def test_close_leaves_no_thread_and_no_file_open(self, store: Store) -> None:
        def cycle() -> None:
            with store.opened() as backend:
                put_all(backend, [item_of(i) for i in range(8)])
                read(backend, names_of(range(8)))
                backend.maintain()

        cycle()  # imports and pools of the process that are made once
        before = residue()
        for _ in range(3):
            cycle()
        assert eventually(lambda: residue() <= before and residue()[1] <= before[1], _CLOSE_S), (
            f"threads and files before: {before}, after three cycles: {residue()}"
        )

    def test_close_ends_in_time_while_others_read(self, store: Store) -> None:
        backend = store.open()
        put_all(backend, [item_of(i) for i in range(16)])
        wrong: list[object] = []
        reading = threading.Barrier(5)

        def work() -> None:
            reading.wait(30)
            try:
                while True:
                    received = Received()
                    statuses = backend.get_many(names_of(range(16)), received, call())
                    wrong.extend(i for i, data in received.data.items() if data != bytes_of(i, 5000))
                    if ReadStatus.OK not in statuses:
                        return  # a closing backend may still answer
            except ClosedError:
                pass
            except BaseException as e:  # noqa: BLE001 - the law judges it
                wrong.append(e)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        reading.wait(30)
        start = time.monotonic()
        backend.close()
        assert time.monotonic() - start < _CLOSE_S
        for thread in threads:
            thread.join(_CLOSE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []

    def test_read_only_reads_and_refuses_every_change(self, store: Store) -> None:
        with store.opened() as backend:
            put_all(backend, [item_of(i) for i in range(4)])
            epoch = backend.epoch(bytes(range(16)))
        try:
            reader = store.open(read_only=True)
        except KVStoreError:
            assert not store.has(Capability.PERSISTENT), "what is there must open read-only"
            return
        expected = [bytes_of(i, 5000) if store.has(Capability.PERSISTENT) else None for i in range(4)]
        assert put(reader, item_of("new"), item_of("more")) == [PutStatus.READ_ONLY] * 2
        _refused_or_idle(lambda: reader.delete_many(names_of(range(4)), call()))
        _refused_or_idle(lambda: reader.discard(name_of(0), int.from_bytes(bytes_of(0, 5000)[184:192], "little")))
        _refused_or_idle(lambda: reader.drop(name_of(0)[:8]))
        reader.touch_many(names_of(range(4)))
        reader.maintain()
        assert read(reader, names_of([*range(4), "new"])) == [*expected, None]
        if store.has(Capability.PERSISTENT):
            assert reader.epoch(bytes(range(16))) == epoch
            with pytest.raises(BackendPermissionError):
                reader.epoch(bytes(range(16)), bump=True)
            reader.close()
            assert read(store.open(), names_of([*range(4), "new"])) == [*expected, None]

    def test_read_only_creates_nothing(self, store: Store) -> None:
        """Where nothing is, it raises or shows an empty store, the second time as the first."""
        answers = []
        for _ in range(2):
            try:
                with store.opened(read_only=True) as backend:
                    answers.append(read(backend, [name_of(0)]))
            except KVStoreError as e:
                answers.append([type(e).__name__.encode()])
        assert answers[0] == answers[1]
        assert answers[0] != [bytes_of(0, 5000)]


def _counted(backend: Backend) -> int:
    """Records after upkeep: media that must list to count do it there."""
    backend.maintain()
    return backend.usage().records


def _outcome(work: Callable[[Backend], object], backend: Backend) -> str:
    """What a call raised; empty when nothing."""
    try:
        work(backend)
    except Exception as e:  # noqa: BLE001 - the law judges it
        return type(e).__name__
    return ""


def _refused_or_idle(change: Callable[[], object]) -> None:
    """A change of a read-only store is refused or does nothing; the records afterwards tell."""
    with contextlib.suppress(BackendPermissionError):
        change()
