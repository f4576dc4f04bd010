"""Reads: every object of a call at once, each record straight to where it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.errors import BackendError, BackendPermissionError, BackendTimeoutError
from kvstore.objects.medium import ObjectBody
from kvstore.objects.naming import NAME_BYTES, key_of
from kvstore.objects.pack import Entry, PackError, index_room
from kvstore.objects.plan import Ask, Plan, Positions
from kvstore.objects.remembered import StoredObject
from kvstore.objects.store import ObjectStore
from kvstore.objects.takers import Taker, Wanted
from kvstore.types import Call, ReadStatus

_WASTE_BYTES: Final = 2 << 20
"""Reading this much for nothing costs about as much as another request: 20 ms at 100 MB/s."""

_PART: Final = 0.75  # of a record: who asks for more than this wants the whole

_PIECE_BYTES: Final = 512 << 10
"""Smaller parts than this, which is 1 MiB of layers compressed, are not worth a request each."""


def status_of(error: BackendError) -> ReadStatus:
    """What a reader's caller is told about a failed object."""
    if isinstance(error, BackendTimeoutError):
        return ReadStatus.TIMEOUT
    return ReadStatus.DENIED if isinstance(error, BackendPermissionError) else ReadStatus.UNAVAILABLE


class Read:
    """One call for names that differ; its objects are read by several threads."""

    def __init__(self, store: ObjectStore, names: Sequence[bytes], taker: Taker, call: Call) -> None:
        self._store = store
        self._names = names
        self._taker = taker
        self._call = call
        self._positions = Positions(call.run, store.pack_blocks)
        self._plan = Plan(names, self._positions, store.remembered)
        self._lock = threading.Lock()
        self._absent = {i for i, name in enumerate(names) if store.remembered.absent(name)}
        self._wanted = {name: i for i, name in enumerate(names) if i not in self._absent}
        self._statuses: list[ReadStatus | None] = [None] * len(names)
        self._failed: list[tuple[bytes, ReadStatus]] = []
        self._limit = len(names)  # with leading_only: what is at this index is not there
        if call.leading_only and self._absent:
            self._limit = min(self._absent)

    def run(self) -> list[ReadStatus]:
        """Read in two rounds: the objects that usually hold the names, then all that may.

        What was missing a moment ago is not asked for again.
        """
        self._store.fanout.each(self._read, self._plan.first(self._absent))
        missing = [i for i, s in enumerate(self._statuses) if s is None and i < self._limit and i not in self._absent]
        if missing and not self._call.stop():
            self._store.fanout.each(self._read, self._plan.rest(missing))
        return self._result()

    def _result(self) -> list[ReadStatus]:
        failed: dict[bytes, ReadStatus] = {}
        for end, status in self._failed:
            for name in self._positions.held_by(end, self._store.pack_blocks):
                failed.setdefault(name, status)
        unread = ReadStatus.ABSENT
        if self._call.stop():
            unread = ReadStatus.SKIPPED if self._call.cancelled else ReadStatus.TIMEOUT
        statuses = [s or failed.get(n, unread) for s, n in zip(self._statuses, self._names, strict=True)]
        self._remember_absent(statuses)
        if self._call.leading_only:
            hole = next((i for i, s in enumerate(statuses) if s is not ReadStatus.OK), len(statuses))
            for i in range(hole + 1, len(statuses)):
                if statuses[i] is ReadStatus.ABSENT:
                    statuses[i] = ReadStatus.SKIPPED
        return statuses

    def _remember_absent(self, statuses: Sequence[ReadStatus]) -> None:
        """Remember what was asked for in vain; with ``leading_only`` names behind the first hole were not asked for."""
        missed = [
            i for i, s in enumerate(statuses) if s is ReadStatus.ABSENT and i <= self._limit and i not in self._absent
        ]
        if missed:
            last = max((i for i, s in enumerate(statuses) if s is ReadStatus.OK), default=-1)
            holes = [i for i in missed if i < last or i == missed[0]]  # and the end of the run, to be found at once
            self._store.remembered.note_holes([self._names[i] for i in holes])
            self._store.remembered.doubt([self._names[i] for i in missed])
            self._store.remembered.note_absent([self._names[i] for i in missed])

    def _read(self, ask: Ask) -> None:
        if self._call.stop() or ask.first > self._limit:
            return
        try:
            there = self._read_object(ask.end)
        except PackError:
            self._store.condemn(ask.end)
            there = False
        except BackendError as e:
            self._failed.append((ask.end, status_of(e)))
            return
        if not there:
            self._missed(ask)

    def _read_object(self, end: bytes) -> bool:
        """Deliver what an object has of what is still wanted; False when it is not there.

        Raises:
            PackError: It is no sound pack, and was none when it was read again: it may have been damaged on its way.
        """
        try:
            return self._read_parts(end) if self._sparse(end) else self._read_whole(end)
        except PackError:
            if self._call.stop():
                raise
            self._store.remembered.lost(end)
            return self._read_parts(end) if self._sparse(end) else self._read_whole(end)

    def _missed(self, ask: Ask) -> None:
        self._store.lost(ask.end)
        if self._call.leading_only and ask.decides >= 0:
            with self._lock:
                self._limit = min(self._limit, ask.decides)

    def _claim(self, name: bytes) -> int | None:
        """Index of a name that nobody has delivered; it is the claimer's to deliver."""
        with self._lock:
            return self._wanted.pop(name, None)

    # -- an object from front to back

    def _read_whole(self, end: bytes) -> bool:
        opened = self._store.open_pack(key_of(end), self._call)
        if opened is None:
            return False
        body, entries = opened
        with body:
            there = StoredObject(end, len(entries), body.nbytes, body.modified)
            self._deliver(self._learn(there, entries), entries, body)
        return True

    def _deliver(self, names: Sequence[bytes], entries: Sequence[Entry], body: ObjectBody) -> None:
        at = entries[0].offset
        for batch in self._batches(names, entries, body.gather_bytes):
            at = self._taker.take_all(batch, at, body)
            for i, _, _ in batch:
                self._statuses[i] = ReadStatus.OK

    def _batches(self, names: Sequence[bytes], entries: Sequence[Entry], most_bytes: int) -> Iterator[list[Wanted]]:
        """Claim the wanted records bit by bit: neighbours of so many bytes together, at least one record."""
        batch: list[Wanted] = []
        nbytes = 0
        for name, entry in zip(names, entries, strict=True):
            if self._call.stop() or not self._wanted:
                break
            if batch and (nbytes + entry.nbytes > most_bytes or batch[-1][2].end != entry.offset):
                yield batch
                batch, nbytes = [], 0
            i = self._claim(name)
            if i is not None:
                batch.append((i, name, entry))
                nbytes += entry.nbytes
        if batch and not self._call.stop():
            yield batch

    def _learn(self, there: StoredObject, entries: Sequence[Entry]) -> list[bytes]:
        """Remember what an object holds; returns the names under which its records are handed over.

        A last record of another name than the object's is passed on under the object's: the core
        finds the key in the record wrong, counts that, and has the object discarded.
        """
        names = [entry.name for entry in entries]
        if names[-1] != there.end:
            names = [b""] * len(entries)  # no wanted name is empty
            if len(there.end) == NAME_BYTES:
                names[-1] = there.end
        known = self._store.remembered.where(there.end)
        if known is not None and known.end == there.end and known.blocks == there.blocks:
            there.modified = there.modified or known.modified
        self._store.remembered.note([name for name in names if name], there)
        return names

    # -- parts of an object

    def _sparse(self, end: bytes) -> bool:
        """Whether asking for the index and then for parts moves so much less that it pays."""
        block_bytes = self._store.context.block_bytes
        known = self._store.remembered.where(end)
        if known is not None and known.end == end and known.nbytes:
            blocks, nbytes = known.blocks, known.nbytes
        else:
            blocks = self._store.pack_blocks if self._positions.of(end) is not None else 1
            nbytes = blocks * block_bytes
        wanted = [self._wanted.get(name) for name in self._positions.held_by(end, blocks)]
        spans = [self._taker.span(i, block_bytes) for i in wanted if i is not None]
        moved = sum(stop - start for start, stop in spans)
        if 0 < moved <= _PART * len(spans) * block_bytes:  # the rest will be asked for later, or never
            return moved >= len(spans) * _PIECE_BYTES
        if nbytes < _WASTE_BYTES or not block_bytes:
            return False
        return nbytes - moved >= max(_WASTE_BYTES, moved) and moved >= len(spans) * _PIECE_BYTES > 0

    def _read_parts(self, end: bytes) -> bool:
        key = key_of(end)
        entries = self._known_entries(end) or self._store.index_of(key, self._call)
        if entries is None:
            return False
        names = self._learn(StoredObject(end, len(entries), entries[-1].end, entries=entries), entries)
        for segment in self._segments(names, entries):
            if self._call.stop():
                return True
            start, stop = segment[0][1][0], segment[-1][1][1]
            body = self._store.medium.read(key, self._call, start=start, stop=stop)
            if body is None:
                return False
            with body:
                if body.nbytes != stop - start:
                    msg = f"bytes {start} to {stop} were asked for, {body.nbytes} are there"
                    raise PackError(msg)
                self._take_segment(segment, start, body)
        return True

    def _known_entries(self, end: bytes) -> Sequence[Entry] | None:
        """The index of an object without asking for it: kept from before, or evident."""
        known = self._store.remembered.where(end)
        if known is None or known.end != end:
            return None
        at = index_room(1, len(end))
        if known.entries is None and known.blocks == 1 and known.nbytes > at:
            return [Entry(end, at, known.nbytes - at, 0, -1)]
        return known.entries

    def _segments(
        self, names: Sequence[bytes], entries: Sequence[Entry]
    ) -> list[list[tuple[Entry, tuple[int, int], bytes]]]:
        """Wanted records with their bytes in the object, those that touch each other together."""
        segments: list[list[tuple[Entry, tuple[int, int], bytes]]] = []
        for name, entry in zip(names, entries, strict=True):
            i = self._wanted.get(name)
            if i is None:
                continue
            start, stop = self._taker.span(i, entry.nbytes)
            piece = (entry, (entry.offset + start, entry.offset + stop), name)
            if segments and segments[-1][-1][1][1] == piece[1][0]:
                segments[-1].append(piece)
            else:
                segments.append([piece])
        return segments

    def _take_segment(self, segment: Sequence[tuple[Entry, tuple[int, int], bytes]], at: int, body: ObjectBody) -> None:
        for entry, _, name in segment:
            i = self._claim(name)
            if i is not None:
                at += self._taker.take(i, name, entry, body, entry.offset - at)
                self._statuses[i] = ReadStatus.OK


class _Some(Taker):
    """Some names of a call, for another taker that knows them all."""

    def __init__(self, taker: Taker, indices: Sequence[int]) -> None:
        self._taker = taker
        self._indices = indices

    def span(self, i: int, nbytes: int) -> tuple[int, int]:
        return self._taker.span(self._indices[i], nbytes)

    def take(self, i: int, name: bytes, entry: Entry, body: ObjectBody, gap_bytes: int) -> int:
        return self._taker.take(self._indices[i], name, entry, body, gap_bytes)


def read_many(store: ObjectStore, names: Sequence[bytes], taker: Taker, call: Call) -> list[ReadStatus]:
    """Read each distinct name once; a name that is given again is read again."""
    first: dict[bytes, int] = {}
    again = [i for i, name in enumerate(names) if first.setdefault(name, i) != i]
    if not again:
        return Read(store, names, taker, call).run()
    statuses = [ReadStatus.SKIPPED] * len(names)
    for part in (list(first.values()), again):
        found = read_many(store, [names[i] for i in part], _Some(taker, part), call)
        for i, status in zip(part, found, strict=True):
            statuses[i] = status
    return statuses
