"""Reading several records of a file with one system call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.backend import RecordInfo
from kvstore.types import ReadStatus
from tests.unit.objects.mem import call_for, chain, content, items_of, put
from tests.unit.objects.trees import BLOCK_BYTES, Opener, openings

NAMES = chain("tree", 16)


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    with openings(tmp_path / "store") as opener:
        yield opener


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each system call that reads records."""
    calls: list[int] = []
    preadv = os.preadv

    def counted(fd: int, views: Sequence[memoryview], at: int) -> int:
        got = preadv(fd, views, at)
        calls.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)
    return calls


@pytest.mark.parametrize("skipped", [{}, {3, 4}, {0, 15}, set(range(16))], ids=lambda s: f"without-{len(s)}")
def test_records_of_a_pack_arrive_whole_and_skipped_ones_are_not_told(opener: Opener, skipped: set[int]) -> None:
    backend = opener()
    put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))
    buffers = [bytearray(BLOCK_BYTES) for _ in NAMES]
    told: list[int] = []

    def place(i: int, info: RecordInfo) -> list[memoryview] | None:
        assert info.nbytes == BLOCK_BYTES
        view = memoryview(buffers[i])
        return None if i in skipped else [view[:0], view[:100], view[100:]]

    assert set(backend.read_many(NAMES, place, told.append, call_for(NAMES))) == {ReadStatus.OK}
    assert told == [i for i in range(16) if i not in skipped]
    assert [bytes(buffers[i]) for i in told] == [content(NAMES[i], BLOCK_BYTES) for i in told]


@pytest.mark.parametrize(("nbytes", "calls"), [(BLOCK_BYTES, 1), (1 << 20, 4)])
def test_small_records_of_a_pack_are_one_read_and_large_ones_one_each(
    opener: Opener, reads: list[int], nbytes: int, calls: int
) -> None:
    backend = opener(block_bytes=nbytes)
    names = chain(nbytes, 4)
    put(backend, items_of(names, 0, 4, nbytes))
    reads.clear()
    buffers = [bytearray(nbytes) for _ in names]
    backend.read_many(names, lambda i, _: [memoryview(buffers[i])], lambda _: None, call_for(names))
    assert len([got for got in reads if got >= nbytes]) == calls
    assert [bytes(buffer) for buffer in buffers] == [content(name, nbytes) for name in names]


def test_a_read_that_comes_short_is_completed(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener()
    put(backend, items_of(NAMES, 0, 16, BLOCK_BYTES))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: 1 + len(views[0]) // 2]], at))
    buffers = [bytearray(BLOCK_BYTES) for _ in NAMES]
    statuses = backend.read_many(NAMES, lambda i, _: [memoryview(buffers[i])], lambda _: None, call_for(NAMES))
    assert set(statuses) == {ReadStatus.OK}
    assert [bytes(buffer) for buffer in buffers] == [content(name, BLOCK_BYTES) for name in NAMES]
