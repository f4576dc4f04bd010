"""The LMDB backend: hot reads are one memory access, shared by processes without a server."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, TypeVar

import lmdb

from kvstore.backend import Backend, BackendContext, Capability, PutItem, Receive, RecordInfo, Usage
from kvstore.errors import BackendPermissionError, BackendUnavailableError, ClosedError, ConfigError
from kvstore.types import Call, Presence, PutStatus, ReadStatus
from kvstore_lmdb import kinship, notes
from kvstore_lmdb.directory import read_descriptions
from kvstore_lmdb.environment import Environment
from kvstore_lmdb.errors import translate
from kvstore_lmdb.reader import Reading, exists_many, scan
from kvstore_lmdb.session import Session
from kvstore_lmdb.writer import Writer

_MAINTAIN_S: Final = 0.05  # background work per call; the core calls about once a second
_READER_CHECK_S: Final = 60.0

T = TypeVar("T")


class LmdbBackend(Backend):
    """Records in one LMDB environment per directory.

    Thread-safe, and several backends of one process may share a directory.  An object inherited
    over a fork raises :class:`~kvstore.errors.ClosedError`; ``open`` in the child works.  Reads run
    in the calling thread on the page cache; the views that ``receive`` gets end with its call.
    """

    capabilities: ClassVar[Capability] = (
        Capability.PERSISTENT | Capability.SHARED | Capability.CALLER_READS | Capability.SCAN | Capability.EVICTS
    )

    def __init__(self) -> None:
        self._session: Session | None = None
        self._checked_readers = 0.0

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

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Hand over each stored record in the order of the names, where it lies in the map."""
        statuses = [ReadStatus.UNAVAILABLE] * len(names)
        with self._reading() as (session, environment):
            if environment is not None:
                reading = Reading(environment, names, receive, call, statuses)
                error = reading.run()
                if error is not None:
                    session.note_trouble(environment, error, "reading")
                if reading.vanished and session.writable():
                    session.writer_of(environment).note_vanished(reading.vanished)
        return statuses

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Store records, 8 to 32 small ones a transaction; a stored name is only refreshed."""
        session = self._open_session()
        session.renew()
        if not session.writable():
            return [PutStatus.READ_ONLY] * len(items)
        with self._entered(session) as environment:
            if environment is None:
                return [PutStatus.UNAVAILABLE] * len(items)
            statuses, error = session.writer_of(environment).put_many(items, call)
            if error is not None:
                session.note_trouble(environment, error, "writing")
            return statuses

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Look names up in the index."""
        answers = [Presence.UNKNOWN] * len(names)
        with self._reading() as (session, environment):
            if environment is not None:
                error = exists_many(environment, names, call, answers)
                if error is not None:
                    session.note_trouble(environment, error, "looking up")
        return answers

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """Delete records in small transactions.

        Raises:
            BackendError: The store is read-only or cannot be written.
        """
        return self._change("deleting", lambda writer: writer.delete_many(names, call))

    def discard(self, name: bytes, header_checksum: int) -> None:
        """Drop a record that failed verification, compared in the same transaction; ignored when read-only."""
        if self._open_session().writable():
            self._change("discarding", lambda writer: writer.discard(name, header_checksum))

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        """Read the epoch from the store each time, so that another process's ``clear`` holds at once."""
        writable = self._open_session().writable()
        return self._run("reading the epoch", lambda env: notes.epoch(env, namespace, bump=bump, writable=writable))

    def touch_many(self, names: Sequence[bytes]) -> None:
        """Queue uses in memory; the next put or :meth:`maintain` writes them."""
        session = self._open_session()
        writer = session.writer
        if writer is not None and session.writable():
            writer.touch(names)

    def drop(self, name_prefix: bytes) -> None:
        """Note the prefix in the store; :meth:`maintain` reclaims it bit by bit, also after a restart."""
        if self._open_session().writable():
            self._run("dropping", lambda env: notes.request_drop(env, name_prefix))

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
        after: bytes | None = b""
        while after is not None:
            infos, after = self._run("listing", functools.partial(scan, after=after))
            yield from infos

    def usage(self) -> Usage:
        """Count exactly, across processes: liblmdb keeps the numbers in every transaction."""
        session = self._open_session()

        def count(environment: Environment) -> Usage:
            space = session.writer_of(environment).space
            with environment.env.begin() as txn:
                pages = space.measure(txn)
                records = int(txn.stat(environment.trees.index)["entries"])
                _, orphaned_bytes = kinship.totals(environment, txn)
            return Usage(
                records=records,
                payload_bytes=pages * environment.page_bytes,
                file_bytes=environment.data.stat().st_size,
                capacity_bytes=space.capacity_bytes,
                evicted=environment.evicted,
                orphaned_bytes=orphaned_bytes,
            )

        return self._run("counting", count)

    def maintain(self) -> None:
        """Flush uses, reclaim drops, shrink, free dead readers' slots, notice a replaced directory."""
        session = self._open_session()
        session.renew()
        with self._entered(session) as environment:
            if environment is None or not session.writable():
                return
            writer = session.writer_of(environment)
            try:
                self._clean_readers(environment)
                end = time.monotonic() + _MAINTAIN_S
                while time.monotonic() < end and (writer.tidy() or writer.reclaim() or writer.shrink()):
                    pass
            except (lmdb.Error, OSError) as e:
                session.note_trouble(environment, e, "maintaining")

    def describe(self) -> dict[str, str]:
        """Facts for ``stat`` and ``doctor``."""
        session = self._open_session()

        def facts(environment: Environment) -> dict[str, str]:
            info = environment.env.info()
            return {
                "path": str(environment.data.parent),
                "engine": "LMDB " + ".".join(map(str, lmdb.version())),
                "file_system": session.file_system or "unknown",
                "map_bytes": str(info["map_size"]),
                "last_page": str(info["last_pgno"]),
                "page_bytes": str(environment.page_bytes),
                "readers": f"{info['num_readers']} of {info['max_readers']} slots used so far",
                "durability": environment.durability,
                "access": "read-only" if environment.read_only else "read-write",
            }

        return self._run("describing", facts)

    def _open_session(self) -> Session:
        session = self._session
        if session is None:
            raise ClosedError("the LMDB backend is not open")
        if session.inherited:
            raise ClosedError("this LMDB backend was inherited over a fork; open one in the child process")
        return session

    @contextlib.contextmanager
    def _entered(self, session: Session) -> Iterator[Environment | None]:
        environment = session.store
        if environment is None:
            yield None
            return
        with environment.entered() as env:
            yield environment if env is not None else None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[tuple[Session, Environment | None]]:
        session = self._open_session()
        with self._entered(session) as environment:
            yield session, environment

    def _run(self, doing: str, work: Callable[[Environment], T]) -> T:
        """Do something that has no status to report a failure by."""
        session = self._open_session()
        with self._entered(session) as environment:
            if environment is None:
                raise BackendUnavailableError(f"{session.directory} is being reopened")
            try:
                return work(environment)
            except (lmdb.Error, OSError) as e:
                session.note_trouble(environment, e, doing)
                raise translate(e, f"{session.directory}: {doing}") from e

    def _change(self, doing: str, work: Callable[[Writer], T]) -> T:
        session = self._open_session()
        if not session.writable():
            raise BackendPermissionError(f"{session.directory} is read-only: {doing} is refused")
        return self._run(doing, lambda environment: work(session.writer_of(environment)))

    def _clean_readers(self, environment: Environment) -> None:
        now = time.monotonic()
        if now - self._checked_readers >= _READER_CHECK_S:
            self._checked_readers = now
            environment.env.reader_check()
