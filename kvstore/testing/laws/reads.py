"""Laws about the three ways to read, and about what callers do in their callbacks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import pytest

from kvstore.backend import Backend, Capability, RecordInfo
from kvstore.testing.samples import (
    Received,
    bytes_of,
    call,
    item_of,
    name_of,
    names_of,
    put_all,
    read,
    read_scattered,
)
from kvstore.testing.store import Store
from kvstore.types import ReadStatus

SIZES: Final = (0, 1, 200, 4096, 20_001)


def _whole(memory: bytearray) -> list[memoryview]:
    return [memoryview(memory)]


def _halves(memory: bytearray) -> list[memoryview]:
    view, middle = memoryview(memory), len(memory) // 2
    return [view[:middle], view[middle:]]


def _odd(memory: bytearray) -> list[memoryview]:
    """A head, crumbs, an empty buffer, and the rest."""
    view = memoryview(memory)
    cuts = [0, 192, 193, 200, 200, 4097, len(memory)]
    cuts = [min(cut, len(memory)) for cut in cuts]
    return [view[start:stop] for start, stop in itertools.pairwise(cuts)]


class CallbackError(Exception):
    """Raised by a caller's own callback."""


class ReadLaws:
    """``get_many``, ``read_many``, ``get_ranges``."""

    def test_read_many_fills_whatever_buffers_it_is_given(self, backend: Backend) -> None:
        put_all(backend, [item_of(nbytes, nbytes) for nbytes in SIZES])
        names = names_of([*SIZES, "absent", *SIZES])
        expected = [bytes_of(nbytes, nbytes) for nbytes in SIZES]
        for cut in (_whole, _halves, _odd):
            assert read_scattered(backend, names, cut) == [*expected, None, *expected], cut.__name__

    def test_read_many_fills_no_buffer_of_a_skipped_record(self, backend: Backend) -> None:
        put_all(backend, [item_of(i, 700) for i in range(4)])
        memory = {i: bytearray(b"\xa5" * 700) for i in range(4)}
        done: list[int] = []

        def place(i: int, _: RecordInfo) -> Sequence[memoryview] | None:
            return [memoryview(memory[i])] if i % 2 else None

        statuses = backend.read_many(names_of(range(4)), place, done.append, call())
        assert sorted(done) == [1, 3]
        assert [statuses[i] for i in (1, 3)] == [ReadStatus.OK] * 2
        assert {statuses[i] for i in (0, 2)} <= {ReadStatus.OK, ReadStatus.SKIPPED}
        assert [bytes(memory[i]) for i in range(4)] == [bytes_of(i, 700) if i % 2 else b"\xa5" * 700 for i in range(4)]

    def test_read_many_tells_name_and_length_before_it_reads(self, backend: Backend) -> None:
        put_all(backend, [item_of(i, 600 + i) for i in range(3)])
        told: dict[int, tuple[bytes, int]] = {}

        def place(i: int, info: RecordInfo) -> None:
            told[i] = (info.name, info.nbytes)

        backend.read_many(names_of(range(3)), place, lambda _i: None, call())
        assert told == {i: (name_of(i), 600 + i) for i in range(3)}

    def test_read_into_is_declared_by_backends_that_do_it(self, backend: Backend, store: Store) -> None:
        own = type(backend).read_many is not Backend.read_many
        assert own or not store.has(Capability.READ_INTO), "READ_INTO is declared, but read_many is the default"

    def test_ranges_are_cut_at_the_records_end(self, backend: Backend) -> None:
        lengths = (0, 1, 500, 9000)
        put_all(backend, [item_of(n, n) for n in lengths])
        for n in lengths:
            data = bytes_of(n, n)
            ends = [(0, n), (0, n + 1), (1, n), (n // 2, n // 2 + 10), (n, n + 5), (n + 3, n + 9)]
            ranges = [(0, 0), (0, 1), *ends, (0, 1 << 40)]
            received = Received()
            statuses = backend.get_ranges([name_of(n)] * len(ranges), ranges, received, call())
            assert received.of(statuses) == [data[start:stop] for start, stop in ranges], f"a record of {n} bytes"

    def test_each_name_has_its_own_range(self, backend: Backend) -> None:
        put_all(backend, [item_of(i, 4000) for i in range(6)])
        names = names_of([0, 1, "absent", 2, 3, 4, 5])
        ranges = [(i * 300, i * 300 + 1000) for i in range(7)]
        received = Received()
        statuses = backend.get_ranges(names, ranges, received, call())
        expected = [bytes_of(i, 4000) for i in range(6)]
        expected.insert(2, b"")
        cuts = [data[start:stop] for data, (start, stop) in zip(expected, ranges, strict=True)]
        assert received.of(statuses) == [*cuts[:2], None, *cuts[3:]]

    def test_ranges_is_declared_by_backends_that_do_it(self, backend: Backend, store: Store) -> None:
        own = type(backend).get_ranges is not Backend.get_ranges
        assert own or not store.has(Capability.RANGES), "RANGES is declared, but get_ranges is the default"

    def test_no_capability_is_declared_that_is_only_reserved(self, store: Store) -> None:
        assert not store.has(Capability.DEVICE_DIRECT), "DEVICE_DIRECT is declared, but no caller can use it yet"

    def test_what_receive_raises_comes_through_and_the_backend_lives(self, backend: Backend) -> None:
        put_all(backend, [item_of(i, 3000) for i in range(8)])

        def receive(i: int, _: memoryview) -> None:
            if i == 4:
                raise CallbackError

        for _ in range(3):
            with pytest.raises(CallbackError):
                backend.get_many(names_of(range(8)), receive, call())
            with pytest.raises(CallbackError):
                backend.get_ranges(names_of(range(8)), [(0, 10)] * 8, receive, call())
        assert read(backend, names_of(range(8))) == [bytes_of(i, 3000) for i in range(8)]
        put_all(backend, [item_of("after")])

    def test_what_place_and_done_raise_comes_through(self, backend: Backend) -> None:
        put_all(backend, [item_of(i, 3000) for i in range(4)])
        culprit = "place"

        def place(i: int, info: RecordInfo) -> Sequence[memoryview]:
            if culprit == "place" and i == 2:
                raise CallbackError
            return [memoryview(bytearray(info.nbytes))]

        def done(i: int) -> None:
            if culprit == "done" and i == 2:
                raise CallbackError

        for culprit in ("place", "done"):  # noqa: B007 - read by the callbacks
            with pytest.raises(CallbackError):
                backend.read_many(names_of(range(4)), place, done, call())
        assert read(backend, names_of(range(4))) == [bytes_of(i, 3000) for i in range(4)]
