"""Reads: short transactions over the map, in the calling thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final

import lmdb

from kvstore.backend import Receive, RecordInfo
from kvstore.types import Call, Presence, ReadStatus
from kvstore_lmdb.entry import Entry
from kvstore_lmdb.environment import Environment

# A read transaction keeps every page that is freed after its start from being reused.
_RENEW_BYTES: Final = 32 << 20
_RENEW_S: Final = 0.05
_SCAN_RECORDS: Final = 512
_STOP_EVERY: Final = 256  # names between two looks at the clock in a pure lookup


def begin(environment: Environment) -> Any:
    """Begin a read transaction whose values are views; frees dead readers' slots when none is left."""
    try:
        return environment.env.begin(buffers=True)
    except lmdb.ReadersFullError:
        environment.env.reader_check()
        return environment.env.begin(buffers=True)


class Reading:
    """Progress of one ``get_many`` over its transactions.

    Attributes:
        at: Names answered so far.
        vanished: Names whose line in the index has lost its record, which somebody else took away.
    """

    def __init__(
        self, environment: Environment, names: Sequence[bytes], receive: Receive, call: Call, statuses: list[ReadStatus]
    ) -> None:
        self.at = 0
        self.vanished: list[bytes] = []
        self._environment: Final = environment
        self._tree: Final = environment.trees.records
        self._names: Final = names
        self._receive: Final = receive
        self._call: Final = call
        self._statuses: Final = statuses

    def run(self) -> Exception | None:
        """Fill the statuses in order; return the error that ended the reading early, if any.

        Exceptions from ``receive`` propagate after the transaction has ended.
        """
        error: Exception | None = None
        while error is None and self.at < len(self._names):
            try:
                txn = begin(self._environment)
            except lmdb.Error as e:
                return e
            with txn:
                error = self._read(txn)
        return error

    def _read(self, txn: Any) -> Exception | None:
        """Read until the end or until the transaction is due for renewal."""
        names, statuses, receive, call = self._names, self._statuses, self._receive, self._call
        find, tree, clock = txn.get, self._tree, time.monotonic
        room, now = _RENEW_BYTES, clock()
        renew_at = now + _RENEW_S
        while self.at < len(names) and room > 0 and now < renew_at:
            if now >= call.deadline or call.cancelled:
                self._rest(ReadStatus.SKIPPED if call.cancelled else ReadStatus.TIMEOUT)
                return None
            try:
                view = find(names[self.at], db=tree)
            except lmdb.BadValsizeError:
                view = None  # no such name can be stored
            except lmdb.Error as e:
                return e
            if view is not None:
                room -= view.nbytes
                try:
                    receive(self.at, view)
                finally:
                    _end(view)
                statuses[self.at] = ReadStatus.OK
            elif self._absent(txn):
                return None
            self.at += 1
            now = clock()
        return None

    def _absent(self, txn: Any) -> bool:
        """Note a missing record; True when it ends the call."""
        self._statuses[self.at] = ReadStatus.ABSENT
        name = self._names[self.at]
        with contextlib.suppress(lmdb.Error):  # such as a name that cannot be stored
            if txn.get(name, db=self._environment.trees.index) is not None:
                self.vanished.append(name)
        if self._call.leading_only:
            self.at += 1
            self._rest(ReadStatus.SKIPPED)
            return True
        return False

    def _rest(self, status: ReadStatus) -> None:
        self._statuses[self.at :] = [status] * (len(self._names) - self.at)
        self.at = len(self._names)


def _end(view: memoryview) -> None:
    """End a view: its memory is the map's and must not outlive the transaction."""
    try:  # noqa: SIM105 - contextlib.suppress costs a microsecond for each record
        view.release()
    except BufferError:
        pass  # a view that the caller made of it still lives; the contract forbids to use it


def exists_many(
    environment: Environment, names: Sequence[bytes], call: Call, answers: list[Presence]
) -> Exception | None:
    """Fill ``answers``; return the error that ended the lookup early, if any.

    Asks the tree of the records themselves, which costs no more than the index and cannot
    advertise what is not there; no page of a payload is touched.
    """
    try:
        with begin(environment) as txn, txn.cursor(db=environment.trees.records) as cursor:
            find = cursor.set_key
            for i, name in enumerate(names):
                if i % _STOP_EVERY == 0 and call.stop():
                    return None
                try:
                    found = find(name)
                except lmdb.BadValsizeError:
                    found = False  # no such name can be stored
                if found:
                    answers[i] = Presence.PRESENT
                    continue
                answers[i] = Presence.ABSENT
                if call.leading_only:
                    answers[i:] = [Presence.ABSENT] * (len(names) - i)
                    return None
    except lmdb.Error as e:
        return e
    return None


def scan(environment: Environment, after: bytes) -> tuple[list[RecordInfo], bytes | None]:
    """List some records whose names follow ``after``; the last name is None at the end."""
    infos: list[RecordInfo] = []
    with begin(environment) as txn, txn.cursor(db=environment.trees.index) as cursor:
        more = cursor.set_range(after) if after else cursor.first()
        if more and bytes(cursor.key()) == after:
            more = cursor.next()
        while more and len(infos) < _SCAN_RECORDS:
            infos.append(Entry.parse(cursor.value()).info(bytes(cursor.key())))
            more = cursor.next()
    return infos, infos[-1].name if more else None
