"""An open LMDB environment, shared by all backends of this process on one directory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb

from kvstore.errors import ClosedError, ConfigError
from kvstore_lmdb.gate import Gate
from kvstore_lmdb.guard import GuardedEnvironment, GuardSettings, close_guarded, open_guarded
from kvstore_lmdb.shared_stores import SharedStores, check_joinable

RECORDS, INDEX, RECENCY, NOTES = b"records", b"index", b"recency", b"notes"
TREES: Final = (RECORDS, INDEX, RECENCY, NOTES)
Removed = Callable[[Sequence[bytes]], None]


@dataclass(frozen=True, slots=True)
class Trees:
    """Handles of the named trees.

    Attributes:
        records: Stored name -> record.
        index: Stored name -> sequence number and sizes (see :mod:`kvstore_lmdb.entry`).
        recency: Sequence number, 8 bytes big-endian -> stored name; oldest use first.
        notes: Format, capacity, epochs, unfinished drops.
    """

    records: lmdb._Database
    index: lmdb._Database
    recency: lmdb._Database
    notes: lmdb._Database


class Environment:
    """An open LMDB environment that all backends of this process on one directory share.

    Operations run between :meth:`entered`; the last user's :meth:`close` waits for them.
    """

    def __init__(self, opened: GuardedEnvironment, trees: Trees) -> None:
        self.opened: Final = opened
        self.env: Final = opened.env
        self.trees: Final = trees
        self.read_only: Final = opened.read_only
        self.durability: Final = opened.durability
        self.page_bytes: Final = int(opened.env.stat()["psize"])
        self.gate: Final = Gate()
        self.write_lock: Final = threading.Lock()
        self.evicted = 0
        self._listeners: dict[int, Removed] = {}
        self._suspect = False
        self._retired = False
        self._void = False
        self._closing = False

    @property
    def data(self) -> Path:
        """Path of the data file."""
        return self.opened.data

    @property
    def usable(self) -> bool:
        """Whether operations may start: neither retired nor inherited over a fork."""
        return not (self._retired or self._void)

    @property
    def inherited(self) -> bool:
        """Whether the process was forked since it was opened."""
        return self._void

    @contextlib.contextmanager
    def entered(self) -> Iterator[lmdb.Environment | None]:
        """Run one operation; yields None when the environment is retired.

        Raises:
            ClosedError: The process was forked since; the child must open its own.
        """
        if self._void:
            raise ClosedError("this LMDB backend was inherited over a fork; open a new one in the child process")
        if not self.gate.enter():
            yield None
            return
        try:
            yield self.env
        finally:
            self.gate.leave()

    def retire(self, *, suspect: bool) -> None:
        """Let no operation start any more; the users drop it and open anew.

        Args:
            suspect: liblmdb reported damage, so the next opener must check the file.
        """
        self._suspect = self._suspect or suspect
        self._retired = True
        self.gate.shut()

    def replaced(self) -> bool:
        """Whether the path no longer leads to the file that is mapped."""
        try:
            found = self.data.lstat()
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self.opened.identity

    def listen(self, owner: int, removed: Removed) -> None:
        """Tell ``removed`` about evicted names until :meth:`forget`."""
        self._listeners = {**self._listeners, owner: removed}

    def forget(self, owner: int) -> None:
        """Stop telling a backend about evicted names."""
        self._listeners = {k: v for k, v in self._listeners.items() if k != owner}

    def report_removed(self, names: Sequence[bytes]) -> None:
        """Tell every backend of this process; call it after the commit."""
        self.evicted += len(names)
        for removed in self._listeners.values():
            removed(names)

    def close(self) -> None:
        """Wait for running operations, bring everything to the medium and close; blocks."""
        self.gate.shut()
        self.gate.wait_empty(None)
        self._closing = True
        close_guarded(self.opened, suspect=self._suspect)

    def void(self) -> None:
        """Give up an inherited environment in a forked child.

        With operations running at the fork, their transactions were copied too: liblmdb would
        give back the parent's reader slots if the object died, so it is kept alive for good.
        """
        self._void = True
        if self.gate.inside or self._closing:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.env))
            return
        self.env.close()  # unmaps and closes this process's descriptors; locks and slots stay the parent's
        if self.opened.state is not None:
            self.opened.state.close()


def join(directory: Path, settings: GuardSettings, logger: logging.Logger) -> Environment:
    """Join or open the environment of a directory; pair with :func:`leave`.

    Raises:
        BackendError: See :func:`~kvstore_lmdb.guard.open_guarded`.
        OSError, lmdb.Error: The system refused.
    """

    def check(environment: Environment) -> None:
        check_joinable(environment, directory, read_only=settings.read_only)
        if not settings.read_only and environment.durability != settings.durability:
            raise ConfigError(
                f"backend 'lmdb', option 'durability': {directory} is open in this process with "
                f"durability = {environment.durability!r}; use the same value everywhere"
            )

    return _STORES.acquire(directory, lambda: _make(open_guarded(directory, settings, logger)), check)


def leave(environment: Environment, logger: logging.Logger) -> None:
    """Give an environment back; the last user closes it, within about 4 s, or a thread does later."""
    _STORES.release(environment, environment.data.parent, logger)


def _check_ours(env: lmdb.Environment, directory: Path) -> None:
    """Leave other programs' databases alone."""
    with env.begin() as txn, txn.cursor() as cursor:
        names = set(cursor.iternext(values=False))
    if names and NOTES not in names:
        raise ConfigError(
            f"backend 'lmdb', option 'path': {directory} holds the LMDB database of another program; "
            "name another directory"
        )


def _make(opened: GuardedEnvironment) -> Environment:
    try:
        _check_ours(opened.env, opened.data.parent)
        opened.env.open_db(NOTES, create=not opened.read_only)  # first: from now on a kill leaves what is ours
        handles = [opened.env.open_db(name, create=not opened.read_only) for name in TREES]
    except BaseException:
        close_guarded(opened)
        raise
    return Environment(opened, Trees(*handles))


_STORES: Final[SharedStores[Environment]] = SharedStores("lmdb")
"""Of this process, because what they guard (POSIX locks) belongs to the process."""
