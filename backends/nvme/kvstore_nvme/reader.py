"""Reads: look names up, read neighbouring slots in one vectored read, check that they stayed.

Nothing locks a region against being emptied and written anew while it is read.  Instead the entry
is looked up again after the read: the index forgets a record before its region is written to, so a
record whose entry is still the same was whole.  The slot header, read in the same pass, must agree
with the entry too: after a power cut either may be older than the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backend import Place, Receive
from kvstore.types import Call, Presence, ReadStatus
from kvstore_nvme.buffers import Parts, Staging, cut_front, plan
from kvstore_nvme.errors import is_media_error, read_status
from kvstore_nvme.index import Entry
from kvstore_nvme.slot import PAGE_BYTES, is_slot_of
from kvstore_nvme.store import Store

_GROUP_BYTES: Final = 2 << 20  # neighbours are joined into reads of this size
_GROUP_VECTORS: Final = 768  # the system takes 1,024
_GROUP_RECORDS: Final = 64
_LOOKUPS: Final = 256  # names between two looks at the clock

Gone = Callable[[bytes, Entry], None]
"""``gone(name, entry)``: the record is not where the index says; forget that entry."""


@dataclass(slots=True)
class _Wanted:
    """One record of a read: its index in the call, where it lies, and the memory for it.

    ``slot`` is page and parts in one, where they are.
    """

    i: int
    entry: Entry
    page: memoryview
    parts: Parts
    front: list[memoryview]
    slot: memoryview | None = None


@dataclass(frozen=True, slots=True)
class _How:
    """Finds memory for a record that is about to be read (None: not wanted), and hands it over."""

    prepare: Callable[[int, Entry, Staging], _Wanted | None]
    deliver: Callable[[_Wanted], None]


class Reading:
    """One read call; makes the statuses."""

    def __init__(self, store: Store, names: Sequence[bytes], call: Call, gone: Gone) -> None:
        self._store: Final = store
        self._names: Final = names
        self._call: Final = call
        self._gone: Final = gone
        self.statuses: Final = [ReadStatus.UNAVAILABLE] * len(names)
        self.error: Exception | None = None

    def read_many(self, place: Place, done: Callable[[int], None]) -> None:
        """Read into the buffers that ``place`` names; see :meth:`kvstore.backend.Backend.read_many`."""

        def prepare(i: int, entry: Entry, staging: Staging) -> _Wanted | None:
            targets = place(i, entry.info(self._names[i]))
            if targets is None:
                return None
            front, body = cut_front(targets, entry.front_bytes)
            page = staging.take(PAGE_BYTES)
            return _Wanted(i, entry, page, plan(body, self._store.segments.align, staging), front)

        def deliver(wanted: _Wanted) -> None:
            at = PAGE_BYTES - wanted.entry.front_bytes
            for view in wanted.front:
                view[:] = wanted.page[at : at + view.nbytes]
                at += view.nbytes
            wanted.parts.spill()
            done(wanted.i)

        self._run(_How(prepare, deliver))

    def get_many(self, receive: Receive) -> None:
        """Hand records over from scratch memory; see :meth:`kvstore.backend.Backend.get_many`."""

        def prepare(i: int, entry: Entry, staging: Staging) -> _Wanted:
            slot = staging.take(entry.pages * PAGE_BYTES)
            body = slot[PAGE_BYTES:]
            parts = Parts([body] if body.nbytes else [], [], body.nbytes)
            return _Wanted(i, entry, slot[:PAGE_BYTES], parts, [], slot)

        def deliver(wanted: _Wanted) -> None:
            start = PAGE_BYTES - wanted.entry.front_bytes
            slot = wanted.slot if wanted.slot is not None else wanted.page
            receive(wanted.i, slot[start : start + wanted.entry.nbytes].toreadonly())

        self._run(_How(prepare, deliver))

    def _run(self, how: _How) -> None:
        entries = self._look_up()
        at = 0
        while at < len(self._names):
            if self._call.stop():
                self._rest(at, ReadStatus.SKIPPED if self._call.cancelled else ReadStatus.TIMEOUT)
                return
            at = self._step(at, entries, how)

    def _look_up(self) -> list[Entry | None]:
        find, names = self._store.index.find, self._names
        entries: list[Entry | None] = []
        with self._store.reading() as txn:
            for name in names:
                entry = find(txn, name)
                entries.append(entry)
                if entry is None and self._call.leading_only:
                    break
        return entries + [None] * (len(names) - len(entries))

    def _step(self, at: int, entries: Sequence[Entry | None], how: _How) -> int:
        """Deal with the names from ``at`` on that one read can serve; return where to go on."""
        entry = entries[at]
        if entry is None:
            self.statuses[at] = ReadStatus.ABSENT
            if self._call.leading_only:
                self._rest(at + 1, ReadStatus.SKIPPED)
                return len(self._names)
            return at + 1
        with self._store.staging() as staging:
            return self._step_on(at, entries, staging, how)

    def _step_on(self, at: int, entries: Sequence[Entry | None], staging: Staging, how: _How) -> int:
        stop = self._neighbours(at, entries)
        group: list[_Wanted] = []
        for i in range(at, stop):
            one = entries[i]
            wanted = how.prepare(i, one, staging) if one is not None else None
            if wanted is None:  # the caller does not want this one: what follows is another read
                self.statuses[i] = ReadStatus.OK
                stop = i + 1
                break
            group.append(wanted)
        for wanted, whole in zip(group, self._read(group), strict=True):
            if whole:
                self.statuses[wanted.i] = ReadStatus.OK
                how.deliver(wanted)
            elif not self._again(wanted, how) and self._call.leading_only:
                self._rest(wanted.i + 1, ReadStatus.SKIPPED)
                return len(self._names)
        return stop

    def _neighbours(self, at: int, entries: Sequence[Entry | None]) -> int:
        """Return the end of the run of names whose slots lie one behind the other."""
        first = entries[at]
        if first is None:
            return at + 1
        nbytes, page = first.pages * PAGE_BYTES, first.page + first.pages
        stop = at + 1
        while stop < len(entries):
            entry = entries[stop]
            if entry is None or (entry.region, entry.page) != (first.region, page):
                break
            nbytes += entry.pages * PAGE_BYTES
            if nbytes > _GROUP_BYTES or stop - at >= _GROUP_RECORDS:
                break
            page += entry.pages
            stop += 1
        return stop

    def _again(self, wanted: _Wanted, how: _How) -> bool:
        """Look once more for a record that was not where it was said to be: it may have been moved."""
        if self.statuses[wanted.i] is not ReadStatus.ABSENT:
            return False
        name, old = self._names[wanted.i], wanted.entry
        with self._store.reading() as txn:
            entry = self._store.index.find(txn, name)
        if entry is None or entry.same_slot(old) or (entry.nbytes, entry.front_bytes) != (old.nbytes, old.front_bytes):
            return False
        wanted.entry = entry
        if not self._read([wanted])[0]:
            return False
        self.statuses[wanted.i] = ReadStatus.OK
        how.deliver(wanted)
        return True

    def _read(self, group: Sequence[_Wanted]) -> list[bool]:
        """Read neighbouring slots; say for each whether it is whole and still the record asked for."""
        if not group:
            return []
        region = group[0].entry.region
        vectors: list[memoryview] = []
        for wanted in group:
            self.statuses[wanted.i] = ReadStatus.ABSENT
            padding = (wanted.entry.pages - 1) * PAGE_BYTES - wanted.parts.nbytes
            vectors += [wanted.page, *wanted.parts.vectors]
            if padding and wanted is not group[-1]:
                vectors.append(memoryview(bytearray(padding)))
        try:
            got = self._store.segments.read(region, group[0].entry.offset, vectors)
        except OSError as e:
            if len(group) > 1:  # perhaps only one of them cannot be read
                return [self._read([wanted])[0] for wanted in group]
            self._failed(group[0], e)
            return [False]
        index, names = self._store.index, self._names
        with self._store.reading() as txn:
            whole = [index.still(txn, names[wanted.i], wanted.entry) for wanted in group]
        end = 0
        last = sum(v.nbytes for v in vectors)
        for k, wanted in enumerate(group):
            entry, name = wanted.entry, names[wanted.i]
            end = min(end + entry.pages * PAGE_BYTES, last)
            sound = got >= end and is_slot_of(wanted.page, name, entry.sequence, (entry.nbytes, entry.front_bytes))
            if whole[k] and not sound:
                whole[k] = False
                self._gone(name, entry)
        return whole

    def _failed(self, wanted: _Wanted, error: OSError) -> None:
        """Note a failed read; bytes that the device cannot read twice are not offered again."""
        self.error = error
        self.statuses[wanted.i] = read_status(error)
        again = is_media_error(error) and self._store.unreadable(wanted.entry.sequence)
        if again or isinstance(error, FileNotFoundError):
            self._gone(self._names[wanted.i], wanted.entry)

    def _rest(self, at: int, status: ReadStatus) -> None:
        self.statuses[at:] = [status] * (len(self._names) - at)


def exists_many(store: Store, names: Sequence[bytes], call: Call) -> list[Presence]:
    """Look names up in the index."""
    answers = [Presence.UNKNOWN] * len(names)
    with store.reading() as txn, txn.cursor(db=store.index.trees.names) as cursor:
        find = cursor.set_key
        for i, name in enumerate(names):
            if i % _LOOKUPS == 0 and call.stop():
                return answers
            if name and len(name) <= 511 and find(name):  # 511: the longest key that liblmdb takes
                answers[i] = Presence.PRESENT
                continue
            answers[i] = Presence.ABSENT
            if call.leading_only:
                answers[i:] = [Presence.ABSENT] * (len(names) - i)
                return answers
    return answers
