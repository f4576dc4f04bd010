"""One shared store per directory and process, and what happens to it on close and fork."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from kvstore.errors import BackendUnavailableError
from kvstore_lmdb.gate import Gate

_CLOSE_S: Final = 4.0
_FORK_WAIT_S: Final = 0.5


class Shareable(Protocol):
    """An open store that several backends of one process use."""

    @property
    def gate(self) -> Gate:
        """What running operations have entered."""

    def close(self) -> None:
        """Wait for running operations and close; may block."""

    def void(self) -> None:
        """Give up what a forked child inherited, leaving the parent's alone."""


class Joinable(Protocol):
    """What decides whether another backend may use an open store."""

    @property
    def usable(self) -> bool:
        """Whether operations may start."""

    @property
    def read_only(self) -> bool:
        """Whether it was opened for reading only."""

    def replaced(self) -> bool:
        """Whether the path no longer leads to what is open."""


StoreT = TypeVar("StoreT", bound=Shareable)


class _Seat(Generic[StoreT]):
    """A directory's entry."""

    def __init__(self, store: StoreT) -> None:
        self.store = store
        self.users = 1
        self.closed = threading.Event()


class SharedStores(Generic[StoreT]):
    """The stores of one kind in this process, by device and inode of their directory; thread-safe.

    POSIX locks belong to the process and end when it closes any descriptor of the file, and liblmdb
    forbids opening an environment twice; so backends on one directory share the store, and a new
    one opens after the old has closed.

    Args:
        kind: Name of the backend, for thread names.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.RLock()
        self._seats: dict[tuple[int, int], _Seat[StoreT]] = {}
        self._hooked = False

    def acquire(self, directory: Path, make: Callable[[], StoreT], check: Callable[[StoreT], None]) -> StoreT:
        """Join or open the store of a directory; pair with :meth:`release`.

        Args:
            directory: Where it is.
            make: Opens it.
            check: Raises when the store that is open already cannot be joined.

        Raises:
            BackendUnavailableError: This process is still closing it.
            OSError: The system refused; besides, whatever ``make`` and ``check`` raise.
        """
        with self._lock:
            self._watch_forks()
            found = directory.stat()
            key = (found.st_dev, found.st_ino)
            seat = self._seats.get(key)
            if seat is not None and not seat.users:
                if not seat.closed.wait(_CLOSE_S):
                    raise BackendUnavailableError(f"{directory} is still being closed by this process; try again")
                seat = None
            if seat is None:
                store = make()
                self._seats[key] = _Seat(store)
                return store
            check(seat.store)
            seat.users += 1
            return seat.store

    def release(self, store: StoreT, directory: Path, logger: logging.Logger) -> None:
        """Give a store back; the last user closes it, within about 4 s."""
        with self._lock:
            key = next((k for k, s in self._seats.items() if s.store is store), None)
            if key is None:
                return
            seat = self._seats[key]
            seat.users -= 1
            if seat.users:
                return
            store.gate.shut()
            # A device that hangs must not hold the caller up: a daemon thread finishes the work.
            name = f"kvstore-{self._kind}-close"
            threading.Thread(target=self._close, args=(key, seat), name=name, daemon=True).start()
        if not seat.closed.wait(_CLOSE_S):
            logger.warning("%s: closing takes longer than %g s and goes on behind", directory, _CLOSE_S)

    def _close(self, key: tuple[int, int], seat: _Seat[StoreT]) -> None:
        try:
            seat.store.close()
        finally:  # the directory can be opened again whatever happened
            seat.closed.set()
            with self._lock:
                if self._seats.get(key) is seat:
                    del self._seats[key]

    def _watch_forks(self) -> None:
        if not self._hooked:
            os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)
            self._hooked = True

    def _stores(self) -> list[StoreT]:
        return [seat.store for seat in list(self._seats.values())]

    def _before(self) -> None:
        for store in self._stores():
            store.gate.pause(_FORK_WAIT_S)

    def _in_parent(self) -> None:
        for store in self._stores():
            store.gate.resume()

    def _in_child(self) -> None:
        inherited = self._stores()
        self._lock = threading.RLock()
        self._seats = {}
        for store in inherited:
            store.void()


def check_joinable(store: Joinable, directory: Path, *, read_only: bool) -> None:
    """Let a backend join an open store.

    Args:
        store: It.
        directory: Where it is.
        read_only: Whether the backend only wants to read.

    Raises:
        BackendUnavailableError: It is on its way out, or was opened for reading only.
    """
    if not store.usable or store.replaced():
        raise BackendUnavailableError(f"{directory} was replaced or damaged while open; it is being reopened")
    if store.read_only and not read_only:
        raise BackendUnavailableError(f"{directory} is open read-only in this process; close that first")
