"""The NVMe backend with segment files: one vectored write a put, one vectored read a get."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, TypeVar

import lmdb
from kvstore_lmdb.directory import read_descriptions

from kvstore.backend import Backend, BackendContext, Capability, Place, PutItem, Receive, RecordInfo, Usage
from kvstore.errors import BackendPermissionError, BackendUnavailableError, ClosedError, ConfigError
from kvstore.types import Call, Presence, PutStatus, ReadStatus
from kvstore_nvme import changes
from kvstore_nvme.epochs import save_epoch
from kvstore_nvme.errors import Failure, translate
from kvstore_nvme.index import Entry
from kvstore_nvme.orphans import Orphans
from kvstore_nvme.ranges import get_ranges
from kvstore_nvme.reader import Reading, exists_many
from kvstore_nvme.session import Session
from kvstore_nvme.slot import PAGE_BYTES
from kvstore_nvme.store import Store

_EPOCH_BYTES: Final = 8
_MAINTAIN_S: Final = 0.05  # background work per call; the core calls about once a second
_READER_CHECK_S: Final = 60.0
_SCAN_RECORDS: Final = 512

T = TypeVar("T")


class NvmeBackend(Backend):
    """Records in preallocated segment files with an index beside them.

    Thread-safe; several backends of one process and several processes may share a directory.  An
    object inherited over a fork raises :class:`~kvstore.errors.ClosedError`; ``open`` in the child
    works.
    """

    capabilities: ClassVar[Capability] = (
        Capability.PERSISTENT
        | Capability.SHARED
        | Capability.READ_INTO
        | Capability.SCAN
        | Capability.EVICTS
        | Capability.RANGES
    )

    def __init__(self) -> None:
        self._session: Session | None = None
        self._checked_readers = 0.0
        self._orphans = Orphans()

    def open(self, context: BackendContext) -> None:
        """Open or create the store; see :class:`~kvstore.backend.Backend`."""
        if self._session is not None and not self._session.inherited:
            raise ConfigError(f"tier {context.tier!r}: this backend is open already; close it first")
        session = Session(context)
        session.open()
        self._session = session

    def close(self) -> None:
        """Release the store; the last user of the process closes it, within about 4 s."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        """Read straight into page-aligned buffers; others are filled from scratch memory."""
        return self._read(names, call, lambda reading: reading.read_many(place, done))

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Hand records over from this thread's scratch memory."""
        return self._read(names, call, lambda reading: reading.get_many(receive))

    def get_ranges(
        self, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
    ) -> list[ReadStatus]:
        """Read the pages that hold each range, and the slot's first page."""
        session, store = self._current()
        with self._entered(store) as inside:
            if inside is None:
                return [ReadStatus.UNAVAILABLE] * len(names)
            statuses, error = get_ranges(inside, names, ranges, receive, call)
            if error is not None:
                session.note_trouble(inside, error, "reading")
            return statuses

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Append records to the region in use; a stored name only counts as used."""
        session = self._open_session()
        session.renew()
        if not session.writable():
            return [PutStatus.READ_ONLY] * len(items)
        store = session.store
        with self._entered(store) as inside:
            if inside is None:
                return [PutStatus.UNAVAILABLE] * len(items)
            statuses, error = session.writer_of(inside).put_many(items, call, durable=session.durable)
            if error is not None:
                session.note_trouble(inside, error, "writing")
            return statuses

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Look names up in the index."""
        session, store = self._current()
        with self._entered(store) as inside:
            if inside is not None:
                try:
                    return exists_many(inside, names, call)
                except Failure as e:
                    session.note_trouble(inside, e, "looking up")
        return [Presence.UNKNOWN] * len(names)

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """Delete records in small transactions.

        Raises:
            BackendError: The store is read-only or cannot be written.
        """
        return self._change("deleting", lambda store: changes.delete_many(store, names, call))

    def discard(self, name: bytes, header_checksum: int) -> None:
        """Drop a record that failed verification, unless it was replaced meanwhile; ignored when read-only."""
        if self._open_session().writable():
            self._change("discarding", lambda store: changes.discard(store, name, header_checksum))

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        """Read the epoch from the index each time, so that another process's ``clear`` holds at once."""
        writable = self._open_session().writable()
        if bump and not writable:
            raise BackendPermissionError(f"{self._open_session().directory} is read-only; its epoch cannot be changed")
        return self._run("reading the epoch", lambda store: _epoch(store, namespace, bump=bump, writable=writable))

    def touch_many(self, names: Sequence[bytes]) -> None:
        """Note uses in memory; the next put or :meth:`maintain` writes them."""
        session, store = self._current()
        if store is not None and session.writable():
            session.writer_of(store).touches.note(names)

    def drop(self, name_prefix: bytes) -> None:
        """Note the prefix in the index; :meth:`maintain` reclaims it bit by bit, also after a restart."""
        if self._open_session().writable():

            def request(store: Store) -> None:
                with store.writing() as txn:
                    store.index.request_drop(txn, name_prefix)

            self._run("dropping", request)

    def namespaces(self) -> list[bytes]:
        """Read the descriptions in the directory.

        Raises:
            BackendUnavailableError: The directory cannot be read.
        """
        directory = self._open_session().directory
        try:
            return read_descriptions(directory)
        except OSError as e:
            raise BackendUnavailableError(f"{directory}: the descriptions of namespaces cannot be read: {e}") from e

    def scan(self) -> Iterator[RecordInfo]:
        """List records from the index; no transaction stays open between the items."""

        def portion(store: Store, after: bytes) -> list[tuple[bytes, Entry]]:
            with store.reading() as txn:
                return store.index.listed(txn, after, _SCAN_RECORDS)

        after = b""
        while found := self._run("listing", functools.partial(portion, after=after)):
            after = found[-1][0]
            for name, entry in found:
                yield entry.info(name)

    def usage(self) -> Usage:
        """Count from the regions' rows, which hold for all processes."""

        def count(store: Store) -> Usage:
            with store.reading() as txn:
                rows, records, budget = store.index.rows(txn), store.index.records(txn), store.index.budget(txn)
            data = store.opened.guarded.data
            overhead = sum(path.stat().st_size for path in (data, data.with_name("lock.mdb")) if path.exists())
            return Usage(
                records=records,
                payload_bytes=sum(row.pages for row in rows.values()) * PAGE_BYTES,
                file_bytes=len(rows) * store.geometry.region_bytes + overhead,
                capacity_bytes=budget[0] if budget is not None else 0,
                evicted=store.evicted,
                orphaned_bytes=self._orphans.nbytes,
            )

        return self._run("counting", count)

    def maintain(self) -> None:
        """Write uses, reclaim drops, enter unknown records, shrink, notice replaced files."""
        session = self._open_session()
        session.renew()
        with self._entered(session.store) as store:
            if store is None or not session.writable():
                return
            try:
                self._clean_readers(store)
                writer, end = session.writer_of(store), time.monotonic() + _MAINTAIN_S
                writer.maintain(end)
                while time.monotonic() < end and (writer.touches.flush() or changes.reclaim(store)):
                    pass
                self._orphans.look(store, end)
            except Failure as e:
                session.note_trouble(store, e, "maintaining")

    def describe(self) -> dict[str, str]:
        """Facts for ``stat`` and ``doctor``."""
        session = self._open_session()

        def facts(store: Store) -> dict[str, str]:
            with store.reading() as txn:
                rows, budget = store.index.rows(txn), store.index.budget(txn)
            return {
                "path": str(store.directory),
                "layout": "segments",
                "file_system": session.file_system or "unknown",
                "io": store.segments.mode,
                "region_bytes": str(store.geometry.region_bytes),
                "regions": str(len(rows)),
                "index_bytes": str(budget[1] if budget is not None else 0),
                "durability": "durable" if session.durable else "cache",
                "access": "read-only" if store.read_only else "read-write",
            }

        return self._run("describing", facts)

    def _open_session(self) -> Session:
        session = self._session
        if session is None:
            raise ClosedError("the NVMe backend is not open")
        if session.inherited:
            raise ClosedError("this NVMe backend was inherited over a fork; open one in the child process")
        return session

    def _current(self) -> tuple[Session, Store | None]:
        session = self._open_session()
        return session, session.store

    @contextlib.contextmanager
    def _entered(self, store: Store | None) -> Iterator[Store | None]:
        if store is None:
            yield None
            return
        with store.entered() as inside:
            yield store if inside else None

    def _read(self, names: Sequence[bytes], call: Call, work: Callable[[Reading], None]) -> list[ReadStatus]:
        session, store = self._current()
        with self._entered(store) as inside:
            if inside is None:
                return [ReadStatus.UNAVAILABLE] * len(names)
            reading = Reading(inside, names, call, functools.partial(self._forget, session, inside))
            try:
                work(reading)
            except lmdb.Error as e:
                reading.error = e
            if reading.error is not None:
                session.note_trouble(inside, reading.error, "reading")
            return reading.statuses

    @staticmethod
    def _forget(session: Session, store: Store, name: bytes, entry: Entry) -> None:
        """Drop an entry that led nowhere, if we may."""
        if session.writable():
            try:
                changes.forget(store, name, entry)
            except Failure as e:
                session.note_trouble(store, e, "dropping an entry")

    def _run(self, doing: str, work: Callable[[Store], T]) -> T:
        """Do something that has no status to report a failure by."""
        session, store = self._current()
        with self._entered(store) as inside:
            if inside is None:
                raise BackendUnavailableError(f"{session.directory} is being reopened")
            try:
                return work(inside)
            except Failure as e:
                session.note_trouble(inside, e, doing)
                raise translate(e, f"{session.directory}: {doing}") from e

    def _change(self, doing: str, work: Callable[[Store], T]) -> T:
        session = self._open_session()
        if not session.writable():
            raise BackendPermissionError(f"{session.directory} is read-only: {doing} is refused")
        return self._run(doing, work)

    def _clean_readers(self, store: Store) -> None:
        now = time.monotonic()
        if now - self._checked_readers >= _READER_CHECK_S:
            self._checked_readers = now
            store.env.reader_check()


def _epoch(store: Store, namespace: bytes, *, bump: bool, writable: bool) -> bytes:
    """Return a namespace's epoch; a new one is written beside the index first."""
    if not bump:
        with store.reading() as txn:
            found = store.index.epoch(txn, namespace)
        if found is not None:
            return found
        if not writable:
            return bytes(_EPOCH_BYTES)  # no name is made with it
    with store.writing() as txn:
        found = None if bump else store.index.epoch(txn, namespace)
        if found is None:
            found = os.urandom(_EPOCH_BYTES)
            save_epoch(store.directory, namespace, found)
            store.index.set_epoch(txn, namespace, found)
        return found
