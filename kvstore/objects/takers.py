"""Where the bytes of a read go: into the caller's buffers, or past a callback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvstore.backend import Place, Receive
from kvstore.objects.medium import ObjectBody
from kvstore.objects.pack import Entry

Wanted = tuple[int, bytes, Entry]
"""A record to take: its index in the call, its name, its place."""


class Taker(ABC):
    """Takes records out of bodies; several threads at once, never twice for one record."""

    @abstractmethod
    def span(self, i: int, nbytes: int) -> tuple[int, int]:
        """Bytes ``[start, stop)`` wanted of record ``i``, which has so many."""

    def take_all(self, wanted: Sequence[Wanted], at: int, body: ObjectBody) -> int:
        """Take several records of a body that was read up to offset ``at`` of its object; returns how far it is now."""
        for i, name, entry in wanted:
            at += self.take(i, name, entry, body, entry.offset - at)
        return at

    @abstractmethod
    def take(self, i: int, name: bytes, entry: Entry, body: ObjectBody, gap_bytes: int) -> int:
        """Take what is wanted of record ``i``, which begins ``gap_bytes`` further on; returns how far it read."""


class IntoBuffers(Taker):
    """Whole records, straight into the buffers that the caller names."""

    def __init__(self, place: Place, done: Callable[[int], None]) -> None:
        self._place = place
        self._done = done

    def span(self, i: int, nbytes: int) -> tuple[int, int]:
        """All of it."""
        del i
        return 0, nbytes

    def take_all(self, wanted: Sequence[Wanted], at: int, body: ObjectBody) -> int:
        """Read records that follow each other at once, those that the caller skips for nothing."""
        if len(wanted) == 1 or wanted[-1][2].end - wanted[0][2].offset != sum(entry.nbytes for _, _, entry in wanted):
            return super().take_all(wanted, at, body)
        views: list[memoryview] = []
        filled: list[int] = []
        for i, name, entry in wanted:
            targets = self._place(i, entry.info(name))
            if targets is None:
                views.append(memoryview(bytearray(entry.nbytes)))
            else:
                views += targets
                filled.append(i)
        if wanted[0][2].offset > at:
            body.skip(wanted[0][2].offset - at)
        body.read_into_all(views)
        for i in filled:
            self._done(i)
        return wanted[-1][2].end

    def take(self, i: int, name: bytes, entry: Entry, body: ObjectBody, gap_bytes: int) -> int:
        """Read into the buffers; nothing is read when the caller wants to skip the record."""
        targets = self._place(i, entry.info(name))
        if targets is None:
            return 0
        if gap_bytes:
            body.skip(gap_bytes)
        nbytes = gap_bytes
        for target in targets:
            body.read_into(target)
            nbytes += target.nbytes
        self._done(i)
        return nbytes


class PastCallback(Taker):
    """Records or parts of them, as views of memory that is used again.

    Args:
        receive: Gets each view; it is valid during the call only.
        ranges: Bytes wanted of each record; None for all.
    """

    def __init__(self, receive: Receive, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        self._receive = receive
        self._ranges = ranges
        self._spare: list[bytearray] = []  # one for each thread that is at work at the same time

    def span(self, i: int, nbytes: int) -> tuple[int, int]:
        """The range, cut at the record's end."""
        if self._ranges is None:
            return 0, nbytes
        start, stop = self._ranges[i]
        start = min(max(0, start), nbytes)
        return start, max(start, min(stop, nbytes))

    def take(self, i: int, name: bytes, entry: Entry, body: ObjectBody, gap_bytes: int) -> int:
        """Read into spare memory and hand it over."""
        del name
        start, stop = self.span(i, entry.nbytes)
        if gap_bytes + start:
            body.skip(gap_bytes + start)
        buffer = self._buffer(stop - start)
        view = memoryview(buffer)[: stop - start]
        body.read_into(view)
        self._receive(i, view.toreadonly())
        self._spare.append(buffer)
        return gap_bytes + stop

    def _buffer(self, nbytes: int) -> bytearray:
        try:
            spare = self._spare.pop()
        except IndexError:
            return bytearray(nbytes)
        return spare if len(spare) >= nbytes else bytearray(nbytes)
