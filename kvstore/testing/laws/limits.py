"""Laws about calls that end early: expired, cancelled, or interested in the leading names only."""

from __future__ import annotations

import time
from typing import Final

import pytest

from kvstore.backend import Backend, Capability, RecordInfo
from kvstore.testing.samples import STORED, Received, bytes_of, call, item_of, names_of, put, put_all, read
from kvstore.testing.store import Store
from kvstore.types import Call, Presence, PutStatus, ReadStatus

PROMPT_S: Final = 2.0  # a stopped call does nothing; the rest is a busy machine
_BATCH: Final = 24
_STOPPED: Final = frozenset({ReadStatus.SKIPPED, ReadStatus.TIMEOUT})


def ended(how: str) -> Call:
    """A call that is over before it begins."""
    made = call() if how == "cancelled" else Call(time.monotonic() - 1.0)
    if how == "cancelled":
        made.cancel()
    assert made.stop()
    return made


class LimitLaws:
    """Deadlines, cancellation, ``leading_only``."""

    @pytest.mark.parametrize("how", ["expired", "cancelled"])
    def test_a_call_that_is_over_reads_nothing(self, backend: Backend, how: str) -> None:
        put_all(backend, [item_of(i) for i in range(_BATCH)])
        names = names_of(range(_BATCH))
        received = Received()
        start = time.monotonic()
        answers = [
            backend.get_many(names, received, ended(how)),
            backend.get_ranges(names, [(0, 9)] * _BATCH, received, ended(how)),
            backend.read_many(names, _nowhere, lambda _i: None, ended(how)),
        ]
        assert time.monotonic() - start < PROMPT_S
        for statuses in answers:
            assert len(statuses) == _BATCH
            assert set(statuses) <= _STOPPED
        assert received.data == {}

    @pytest.mark.parametrize("how", ["expired", "cancelled"])
    def test_a_call_that_is_over_stores_nothing(self, backend: Backend, how: str) -> None:
        start = time.monotonic()
        statuses = backend.put_many([item_of(i) for i in range(_BATCH)], ended(how))
        assert time.monotonic() - start < PROMPT_S
        assert statuses == [PutStatus.TIMEOUT] * _BATCH
        assert read(backend, names_of(range(_BATCH))) == [None] * _BATCH

    @pytest.mark.parametrize("how", ["expired", "cancelled"])
    def test_a_call_that_is_over_answers_existence_truly_or_not_at_all(self, backend: Backend, how: str) -> None:
        put_all(backend, [item_of(i) for i in range(0, _BATCH, 2)])
        start = time.monotonic()
        found = backend.exists_many(names_of(range(_BATCH)), ended(how))
        assert time.monotonic() - start < PROMPT_S
        assert len(found) == _BATCH
        for i, presence in enumerate(found):
            assert presence in (Presence.UNKNOWN, Presence.ABSENT if i % 2 else Presence.PRESENT)

    @pytest.mark.parametrize("how", ["expired", "cancelled"])
    def test_a_delete_that_is_over_counts_what_it_did(self, backend: Backend, how: str) -> None:
        put_all(backend, [item_of(i) for i in range(_BATCH)])
        deleted = backend.delete_many(names_of(range(_BATCH)), ended(how))
        assert read(backend, names_of(range(_BATCH))).count(None) == deleted

    def test_a_read_stops_when_it_is_cancelled_in_the_middle(self, backend: Backend, store: Store) -> None:
        put_all(backend, [item_of(i) for i in range(_BATCH)])
        limits, received = call(), Received()

        def receive(i: int, view: memoryview) -> None:
            received(i, view)
            if len(received.order) == 3:
                limits.cancel()

        statuses = backend.get_many(names_of(range(_BATCH)), receive, limits)
        found = received.of(statuses)
        assert found == [None if data is None else bytes_of(i, 5000) for i, data in enumerate(found)]
        if store.has(Capability.CALLER_READS):
            assert statuses == [ReadStatus.OK] * 3 + [ReadStatus.SKIPPED] * (_BATCH - 3)
        else:  # what is on its way may still arrive
            assert set(statuses) <= {ReadStatus.OK, *_STOPPED}

    def test_a_leading_read_may_stop_at_the_first_hole(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in (0, 1, 2, 4, 5)])
        received = Received()
        statuses = backend.get_many(names_of(range(6)), received, call(leading_only=True))
        found = received.of(statuses)
        assert statuses[:4] == [ReadStatus.OK] * 3 + [ReadStatus.ABSENT]
        assert set(statuses[4:]) <= {ReadStatus.OK, ReadStatus.SKIPPED}
        assert all(data in (None, bytes_of(i, 5000)) for i, data in enumerate(found))

    def test_a_leading_read_without_holes_is_complete(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in range(6)])
        assert read(backend, names_of(range(6)), call(leading_only=True)) == [bytes_of(i, 5000) for i in range(6)]

    def test_leading_existence_ends_at_the_first_hole(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in (0, 1, 2, 4, 5)])
        found = backend.exists_many(names_of(range(6)), call(leading_only=True))
        assert found[:4] == [Presence.PRESENT] * 3 + [Presence.ABSENT]
        assert len(found) == 6
        assert set(found[4:]) <= {Presence.PRESENT, Presence.ABSENT}
        nothing = backend.exists_many(names_of(["a", "b"]), call(leading_only=True))
        assert nothing == [Presence.ABSENT] * 2

    def test_holes_do_not_end_other_calls(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in (1, 3)])
        assert read(backend, names_of(range(4))) == [None if i % 2 == 0 else bytes_of(i, 5000) for i in range(4)]

    def test_a_put_under_a_short_deadline_says_what_it_stored(self, backend: Backend) -> None:
        items = [item_of(i, 200_000) for i in range(_BATCH)]
        statuses = backend.put_many(items, call(0.01))
        assert set(statuses) <= {*STORED, PutStatus.TIMEOUT}
        found = read(backend, names_of(range(_BATCH)))
        for i, status in enumerate(statuses):
            assert found[i] in ({bytes_of(i, 200_000)} if status in STORED else {None, bytes_of(i, 200_000)})
        assert set(put(backend, *items)) <= STORED


def _nowhere(_: int, info: RecordInfo) -> list[memoryview]:
    return [memoryview(bytearray(info.nbytes))]
