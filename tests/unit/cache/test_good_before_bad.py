"""A damaged block ends a prefix; it must not cost the good blocks before it that are still on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import CorruptRecordError
from kvstore.l2.receiver import Receiver
from kvstore.types import BlockStatus, Call, ReadStatus


class Decoder:
    def open(self, view: memoryview, digest: bytes) -> Any:
        del digest
        if bytes(view) == b"bad":
            raise CorruptRecordError("checksum", "as the test wants it")
        return SimpleNamespace(is_raw=True)

    def recycle(self) -> None:
        """Nothing is kept."""


def receiver(n: int, *, leading_only: bool) -> tuple[Receiver, Call]:
    call = Call.within(60, leading_only=leading_only)
    shelf: Any = SimpleNamespace(decoder=Decoder)
    names = [bytes([i]) for i in range(n)]
    return Receiver(shelf, names, names, lambda _i, _block: None, call), call


@pytest.mark.parametrize("order", [[3, 0, 1, 2], [2, 3, 1, 0], [0, 1, 3, 2], [1, 0, 2, 3]])
def test_a_bad_record_ends_a_leading_read_only_when_all_before_it_are_here(order: list[int]) -> None:
    taken, call = receiver(6, leading_only=True)
    arrived: set[int] = set()
    for i in order:
        assert not call.cancelled
        taken.receive(i, memoryview(b"bad" if i == 3 else b"good"))
        arrived.add(i)
        assert call.cancelled == (arrived >= {0, 1, 2, 3})
    taken.finish()
    statuses = [taken.status(i, ReadStatus.OK) for i in range(4)]
    assert statuses == [BlockStatus.DELIVERED] * 3 + [BlockStatus.CORRUPT]


def test_the_first_of_several_bad_records_counts() -> None:
    taken, call = receiver(6, leading_only=True)
    taken.receive(4, memoryview(b"bad"))
    taken.receive(0, memoryview(b"good"))
    assert not call.cancelled
    taken.receive(1, memoryview(b"bad"))
    assert call.cancelled


def test_a_bad_record_does_not_end_a_read_of_independent_blocks() -> None:
    taken, call = receiver(2, leading_only=False)
    taken.receive(0, memoryview(b"bad"))
    taken.receive(1, memoryview(b"good"))
    assert not call.cancelled
