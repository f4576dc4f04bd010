"""Laws about calls with several names: order, duplicates, and the form of the answers."""

from __future__ import annotations

import threading
import time

from kvstore.backend import Backend, Capability
from kvstore.testing.samples import (
    STORED,
    Received,
    bytes_of,
    call,
    item_of,
    name_of,
    names_of,
    put,
    put_all,
    read,
)
from kvstore.testing.store import Store
from kvstore.types import Presence, PutStatus, ReadStatus

_MANY = 200


class BatchLaws:
    """Several names in one call."""

    def test_an_empty_batch_has_an_empty_answer(self, backend: Backend) -> None:
        received = Received()
        assert backend.get_many([], received, call()) == []
        assert backend.read_many([], lambda _i, _info: None, lambda _i: None, call()) == []
        assert backend.get_ranges([], [], received, call()) == []
        assert backend.put_many([], call()) == []
        assert backend.exists_many([], call()) == []
        assert backend.delete_many([], call()) == 0
        backend.touch_many([])
        assert received.data == {}

    def test_answers_have_the_order_of_the_names(self, backend: Backend) -> None:
        put_all(backend, [item_of(i, 300 + i) for i in (5, 1, 3)])
        names = names_of(range(6))
        there = [i in (1, 3, 5) for i in range(6)]
        assert read(backend, names) == [bytes_of(i, 300 + i) if t else None for i, t in enumerate(there)]
        statuses = backend.get_many(names, Received(), call())
        assert statuses == [ReadStatus.OK if t else ReadStatus.ABSENT for t in there]
        assert backend.exists_many(names, call()) == [Presence.PRESENT if t else Presence.ABSENT for t in there]

    def test_put_answers_have_the_order_of_the_items(self, backend: Backend) -> None:
        put(backend, item_of(1), item_of(3))
        statuses = put(backend, *[item_of(i) for i in range(5)])
        assert len(statuses) == 5
        assert [statuses[i] for i in (0, 2, 4)] == [PutStatus.STORED] * 3
        assert {statuses[1], statuses[3]} <= STORED
        assert read(backend, names_of(range(5))) == [bytes_of(i, 5000) for i in range(5)]

    def test_answers_are_lists_of_statuses(self, backend: Backend) -> None:
        put(backend, item_of(0))
        names = names_of(range(2))
        answers = [
            (backend.put_many([item_of(0), item_of(2)], call()), PutStatus),
            (backend.get_many(names, Received(), call()), ReadStatus),
            (backend.read_many(names, lambda _i, _info: None, lambda _i: None, call()), ReadStatus),
            (backend.get_ranges(names, [(0, 1)] * 2, Received(), call()), ReadStatus),
            (backend.exists_many(names, call()), Presence),
        ]
        for answer, kind in answers:
            assert isinstance(answer, list)
            assert [type(status) for status in answer] == [kind, kind]
        assert type(backend.delete_many(names, call())) is int

    def test_a_name_asked_for_twice_is_answered_twice(self, backend: Backend) -> None:
        put(backend, item_of(1))
        names = names_of([1, 0, 1, 1, 0])
        data = bytes_of(1, 5000)
        assert read(backend, names) == [data, None, data, data, None]
        assert backend.exists_many(names, call()) == [
            Presence.PRESENT if n == name_of(1) else Presence.ABSENT for n in names
        ]

    def test_an_item_given_twice_is_one_record(self, backend: Backend, store: Store) -> None:
        statuses = put(backend, item_of(1), item_of(2), item_of(1))
        assert statuses[1] is PutStatus.STORED
        assert PutStatus.STORED in (statuses[0], statuses[2])
        assert set(statuses) <= STORED
        assert read(backend, names_of([1, 2])) == [bytes_of(i, 5000) for i in (1, 2)]
        if store.has(Capability.SCAN):
            assert sorted(info.name for info in backend.scan()) == sorted(names_of([1, 2]))

    def test_a_large_batch_is_answered_completely(self, backend: Backend) -> None:
        put_all(backend, [item_of(i, 400) for i in range(0, _MANY, 2)], most=_MANY)
        names = names_of(range(_MANY))
        assert read(backend, names) == [bytes_of(i, 400) if i % 2 == 0 else None for i in range(_MANY)]
        found = backend.exists_many(names, call())
        assert found == [Presence.PRESENT if i % 2 == 0 else Presence.ABSENT for i in range(_MANY)]
        assert backend.delete_many(names, call()) == _MANY // 2

    def test_caller_reads_arrive_in_order_in_the_calling_thread(self, backend: Backend, store: Store) -> None:
        put_all(backend, [item_of(i, 300) for i in range(40)])
        order: list[int] = []
        threads: set[int] = set()

        def receive(i: int, view: memoryview) -> None:
            order.append(i)
            threads.add(threading.get_ident())
            assert bytes(view) == bytes_of(39 - i, 300)

        backend.get_many(names_of(range(39, -1, -1)), receive, call())
        assert sorted(order) == list(range(40))
        if store.has(Capability.CALLER_READS):
            assert order == list(range(40))
            assert threads == {threading.get_ident()}

    def test_without_parallel_no_two_records_arrive_at_once(self, backend: Backend, store: Store) -> None:
        put_all(backend, [item_of(i, 300) for i in range(24)])
        inside = threading.Lock()
        overlaps: list[int] = []
        received = Received()

        def receive(i: int, view: memoryview) -> None:
            alone = inside.acquire(blocking=False)
            try:
                overlaps.extend([] if alone else [i])
                time.sleep(0.001)  # long enough to be met by another one
                received(i, view)
            finally:
                if alone:
                    inside.release()

        statuses = backend.get_many(names_of(range(24)), receive, call())
        assert received.of(statuses) == [bytes_of(i, 300) for i in range(24)]
        assert store.has(Capability.PARALLEL) or overlaps == []
