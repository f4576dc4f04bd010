"""Every change to stored records: put, touch, delete, discard, reclaim."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import lmdb

from kvstore.backend import PutItem
from kvstore.types import Call, PutStatus
from kvstore_lmdb import notes
from kvstore_lmdb.bound import FileBound
from kvstore_lmdb.entry import MAX_RECORD_BYTES, Entry, refreshed, sequence_key, sequence_of
from kvstore_lmdb.environment import Environment
from kvstore_lmdb.errors import is_full, is_io_error, put_status
from kvstore_lmdb.kinship import Kinship
from kvstore_lmdb.space import Space, remove
from kvstore_lmdb.staging import Staging

Transaction = Any  # lmdb.Transaction is generic in the stubs only

MAX_NAME_BYTES: Final = 511  # liblmdb's longest key
_BATCH_RECORDS: Final = 32
_BATCH_BYTES: Final = 4 << 20  # larger dirty transactions cost more CPU than their commits save
_ATTEMPTS: Final = 3
_SPARE_DISK_BYTES: Final = 1 << 20  # tree pages of a transaction, and what others take meanwhile
_TOUCHES_KEPT: Final = 1 << 16
_TOUCHES_WITH_PUT: Final = 128
_TOUCHES_ALONE: Final = 1024
_DROP_RECORDS: Final = 64
_DROP_BYTES: Final = 4 << 20
_HEADER_BYTES: Final = 192
_CHECKSUM_AT: Final = 184


@dataclass(slots=True)
class _Batch:
    """Records of one transaction, by their place in the call, and what became of them."""

    items: Sequence[PutItem]
    waiting: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    done: dict[int, PutStatus] = field(default_factory=dict)

    def settle(self, results: dict[int, PutStatus]) -> None:
        """Take over the results of a committed transaction."""
        self.done.update(results)
        self.waiting = [i for i in self.waiting if i not in results]

    def give_up(self, status: PutStatus) -> None:
        """End every record that still waits with ``status``."""
        self.settle(dict.fromkeys(self.waiting, status))


class Writer:
    """Serialises this process's writes to one environment; thread-safe."""

    def __init__(self, environment: Environment, capacity_bytes: int) -> None:
        self.environment: Final = environment
        self._env: Final = environment.env
        self._trees: Final = environment.trees
        self.space: Final = Space(environment, capacity_bytes)
        self._bound: Final = FileBound(environment, self.space)
        self._staging: Final = Staging()
        self._touched: dict[bytes, int] = {}  # name -> sequence number that its use has earned
        self._newest_use = 0
        self._vanished: set[bytes] = set()
        self._touch_lock: Final = threading.Lock()

    def put_many(self, items: Sequence[PutItem], call: Call) -> tuple[list[PutStatus], Exception | None]:
        """Store records in batches; return one status per item, and the error that stopped it if any."""
        statuses = [PutStatus.TOO_LARGE] * len(items)
        error: Exception | None = None
        for batch in self._batches(items):
            if error is None and not call.stop() and self.environment.write_lock.acquire(timeout=call.remaining()):
                try:
                    error = self._put_batch(batch)
                finally:
                    self.environment.write_lock.release()
            batch.give_up(PutStatus.TIMEOUT if error is None else put_status(error))
            for i, status in batch.done.items():
                statuses[i] = status
        if self.environment.durability == "durable" and PutStatus.STORED in statuses:
            error = self._make_durable(statuses) or error
        return statuses, error

    def _make_durable(self, statuses: list[PutStatus]) -> Exception | None:
        """Bring the last commit's meta page to the medium: its transaction counts only with that."""
        try:
            self._env.sync(True)  # noqa: FBT003 - positional in every py-lmdb
        except (lmdb.Error, OSError) as e:
            failed = put_status(e)
            statuses[:] = [failed if status is PutStatus.STORED else status for status in statuses]
            return e
        return None

    def _batches(self, items: Sequence[PutItem]) -> Iterator[_Batch]:
        most_bytes = min(_BATCH_BYTES, self.space.limits.capacity * self.environment.page_bytes // 8)
        batch, batch_bytes = _Batch(items), 0
        for i, item in enumerate(items):
            nbytes = item.nbytes
            sound = 1 <= len(item.name) <= MAX_NAME_BYTES and nbytes <= MAX_RECORD_BYTES
            if not sound or not self.space.fits(nbytes):
                continue
            if batch.waiting and (len(batch.waiting) == _BATCH_RECORDS or batch_bytes + nbytes > most_bytes):
                yield batch
                batch, batch_bytes = _Batch(items), 0
            batch.waiting.append(i)
            batch.sizes[i] = nbytes
            batch_bytes += nbytes
        if batch.waiting:
            yield batch

    def _put_batch(self, batch: _Batch) -> Exception | None:
        """Store one batch; a full medium is answered by evicting in a transaction of its own."""
        for attempt in range(_ATTEMPTS):
            try:
                self._attempt(batch, again=attempt > 0)
            except (lmdb.Error, OSError) as e:
                if not (is_full(e) or (is_io_error(e) and self._disk_is_full(batch))):
                    return e
            if not batch.waiting:
                return None
        batch.give_up(PutStatus.FULL)
        return None

    def _disk_is_full(self, batch: _Batch) -> bool:
        """Whether an I/O error can come from a lack of room: evicting for a failing disk would only lose records."""
        disk = os.statvfs(self.environment.data.parent)
        return disk.f_bavail * disk.f_frsize < sum(batch.sizes[i] for i in batch.waiting) + _SPARE_DISK_BYTES

    def _needed(self, txn: Transaction, batch: _Batch) -> int:
        """Pages that the batch will add: its records that are not stored yet."""
        with txn.cursor(db=self._trees.index) as cursor:
            new = [i for i in batch.waiting if not cursor.set_key(batch.items[i].name)]
        return sum(self.space.pages(batch.sizes[i]) for i in new)

    def _attempt(self, batch: _Batch, *, again: bool) -> None:
        """Make room and store; ``again`` when the medium had less room than counted."""
        with self._env.begin() as txn:
            live, pages = self.space.measure(txn), self._needed(txn, batch)
        if again:
            self.space.evict_for_now(2 * pages)
        else:
            if self.space.excess(live, pages) > 0:  # what was used shall not go: a put touches the head that is there
                self._flush_touches(newest=True)
            self.space.make_room(live, pages)
        if not pages or not self._bound.near(pages):
            batch.settle(self._commit(batch, batch.waiting))
            return
        for i in list(batch.waiting):
            if not self._bound.admit(self.space.pages(batch.sizes[i])):
                batch.give_up(PutStatus.FULL)
                return
            before = self._bound.last_page()
            batch.settle(self._commit(batch, [i]))
            self._bound.watch(before)

    def _commit(self, batch: _Batch, chosen: Sequence[int]) -> dict[int, PutStatus]:
        """Store what fits in one transaction; items left out of the result did not fit."""
        results: dict[int, PutStatus] = {}
        with self._env.begin(write=True) as txn:
            live = self.space.measure(txn)
            if not self._bound.spent():
                self._apply_touches(txn, self._take_touches(_TOUCHES_WITH_PUT))
            sequence = self._next_sequence(txn)
            kinship = Kinship(self.environment, txn)
            for i in chosen:
                name = batch.items[i].name
                if self._refresh(txn, name, sequence):
                    results[i] = PutStatus.EXISTS
                else:
                    live += self.space.pages(batch.sizes[i])
                    if live > self.space.limits.capacity:
                        continue
                    remove(self.environment, txn, name, kinship)  # a line whose record somebody else took away
                    entry = Entry.of(batch.items[i], batch.sizes[i], sequence)
                    children_bytes = kinship.stored(name, entry.parent, entry.nbytes)
                    self._store(txn, batch.items[i], entry, children_bytes)
                    results[i] = PutStatus.STORED
                sequence += 1
            kinship.settle()
        with self._touch_lock:  # a clock that was set back must not make later uses older than these records
            self._newest_use = max(self._newest_use, sequence - 1)
        return results

    def _store(self, txn: Transaction, item: PutItem, entry: Entry, children_bytes: int) -> None:
        txn.put(item.name, self._staging.gather(item.buffers), db=self._trees.records)
        txn.put(item.name, entry.pack(children_bytes=children_bytes), db=self._trees.index)
        txn.put(sequence_key(entry.sequence), item.name, append=True, db=self._trees.recency)

    def _refresh(self, txn: Transaction, name: bytes, sequence: int) -> bool:
        """Move a stored record to the recent end; False when it is not stored."""
        found = txn.get(name, db=self._trees.index)
        if found is None or not self._has_record(txn, name):
            return False
        self._renumber(txn, name, found, sequence)
        return True

    def _renumber(self, txn: Transaction, name: bytes, line: bytes, sequence: int) -> None:
        txn.delete(sequence_key(sequence_of(line)), db=self._trees.recency)
        txn.put(sequence_key(sequence), name, db=self._trees.recency)
        txn.put(name, refreshed(line, sequence), db=self._trees.index)

    def _has_record(self, txn: Transaction, name: bytes) -> bool:
        """Whether the record itself is there; touches no page of its payload."""
        with txn.cursor(db=self._trees.records) as cursor:
            return bool(cursor.set_key(name))

    def _next_sequence(self, txn: Transaction) -> int:
        """Microseconds now, or one more than the last: always larger, whatever the clock does."""
        with txn.cursor(db=self._trees.recency) as cursor:
            last = int.from_bytes(cursor.key(), "big") if cursor.last() else 0
        return max(last + 1, time.time_ns() // 1000)

    def touch(self, names: Sequence[bytes]) -> None:
        """Queue uses, least valuable first; the oldest queued ones are lost when there are too many.

        A use keeps the time at which it happened, however long it waits: it must not make its record
        younger than what was stored in between.
        """
        with self._touch_lock:
            for name in names:
                self._newest_use = max(self._newest_use + 1, time.time_ns() // 1000)
                self._touched.pop(name, None)
                self._touched[name] = self._newest_use
            while len(self._touched) > _TOUCHES_KEPT:
                del self._touched[next(iter(self._touched))]

    def _take_touches(self, most: int, *, newest: bool = False) -> list[tuple[bytes, int]]:
        with self._touch_lock:
            queued = self._touched.items()
            touches = list(itertools.islice(reversed(queued) if newest else queued, most))
            for name, _ in touches:
                del self._touched[name]
        return touches

    def _apply_touches(self, txn: Transaction, touches: Sequence[tuple[bytes, int]]) -> None:
        """Give each record the number that its use has earned, unless it has a higher one by now."""
        with txn.cursor(db=self._trees.recency) as taken:
            for name, sequence in touches:
                found = txn.get(name, db=self._trees.index)
                if found is None or sequence_of(found) >= sequence or not self._has_record(txn, name):
                    continue
                free = sequence
                while taken.set_key(sequence_key(free)):  # another process had the same microsecond
                    free += 1
                self._renumber(txn, name, found, free)

    def note_vanished(self, names: Sequence[bytes]) -> None:
        """Queue lines of the index whose records are gone; :meth:`tidy` takes them away."""
        with self._touch_lock:
            self._vanished.update(names)

    def tidy(self) -> bool:
        """Write one portion of what reads have queued; False when nothing is left."""
        with self._touch_lock:
            vanished = [self._vanished.pop() for _ in range(min(len(self._vanished), _DROP_RECORDS))]
        if not vanished:
            with self.environment.write_lock:
                return self._flush_touches()
        with self.environment.write_lock, self._env.begin(write=True) as txn:
            kinship = Kinship(self.environment, txn)
            for name in vanished:
                if not self._has_record(txn, name):
                    remove(self.environment, txn, name, kinship)
            kinship.settle()
        return True

    def _flush_touches(self, *, newest: bool = False) -> bool:
        """Write one portion of queued uses; False when none is left, or no page to spare for them.

        The caller holds the write lock.
        """
        if self._bound.spent():  # they stay queued
            return False
        touches = self._take_touches(_TOUCHES_ALONE, newest=newest)
        if not touches:
            return False
        with self._env.begin(write=True) as txn:
            self._apply_touches(txn, touches)
        return True

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """Delete records in small transactions, so that a full file needs few new pages for it."""
        count = 0
        for start in range(0, len(names), _DROP_RECORDS):
            if call.stop():
                break
            some = [n for n in names[start : start + _DROP_RECORDS] if 1 <= len(n) <= MAX_NAME_BYTES]
            with self.environment.write_lock, self._env.begin(write=True) as txn:
                kinship = Kinship(self.environment, txn)
                count += sum(remove(self.environment, txn, name, kinship) is not None for name in some)
                kinship.settle()
        return count

    def discard(self, name: bytes, header_checksum: int) -> None:
        """Drop a record whose header still carries ``header_checksum``."""
        with self.environment.write_lock, self._env.begin(write=True) as txn:
            found = txn.get(name, db=self._trees.records)
            if found is None:
                return
            short = len(found) < _HEADER_BYTES
            if short or struct.unpack_from("<Q", found, _CHECKSUM_AT)[0] == header_checksum:
                kinship = Kinship(self.environment, txn)
                remove(self.environment, txn, name, kinship)
                kinship.settle()

    def reclaim(self) -> bool:
        """Delete one portion of the records under a dropped prefix; False when nothing is pending."""
        with self._env.begin() as txn:
            prefix = notes.next_drop(self.environment, txn)
        if prefix is None:
            return False
        with self.environment.write_lock, self._env.begin(write=True) as txn:
            freed = count = 0
            kinship = Kinship(self.environment, txn)
            with txn.cursor(db=self._trees.index) as cursor:
                while count < _DROP_RECORDS and freed < _DROP_BYTES:
                    if not cursor.set_range(prefix) or not bytes(cursor.key()).startswith(prefix):
                        notes.finish_drop(self.environment, txn, prefix)
                        break
                    entry = remove(self.environment, txn, bytes(cursor.key()), kinship)
                    freed += entry.nbytes if entry is not None else 0
                    count += 1
            kinship.settle()
        return True

    def shrink(self) -> bool:
        """Evict one portion when the capacity was lowered; False when nothing is over."""
        with self._env.begin() as txn:
            over = self.space.measure(txn) - self.space.limits.capacity
        if over <= 0:
            return False
        with self.environment.write_lock:
            return self.space.evict(min(over, _DROP_BYTES // self.environment.page_bytes)) > 0
