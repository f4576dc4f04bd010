"""One shared store per directory and process, and what happens to it on close and fork."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstore.errors import BackendUnavailableError
from kvstore_nvme.shared import Shared
from kvstore_nvme.store import Store

_CLOSE_S: Final = 4.0
_FORK_WAIT_S: Final = 0.5


class _Seat:
    """A directory's entry in the registry."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.store = shared.store
        self.users = 1
        self.closed = threading.Event()


class Registry:
    """The stores of this process by device and inode of their directory.

    POSIX locks belong to the process and end when it closes any descriptor of the file, and liblmdb
    forbids opening an environment twice; so backends on one directory share the store, and a new
    one opens after the old has closed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._seats: dict[tuple[int, int], _Seat] = {}
        self._hooked = False

    def acquire(self, directory: Path, make: Callable[[], Shared], *, read_only: bool) -> Shared:
        """Join or open the store of a directory; pair with :meth:`release`.

        Raises:
            BackendError: The store here is unusable, or ``make`` failed.
            OSError, lmdb.Error: The system refused.
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
                shared = make()
                self._seats[key] = _Seat(shared)
                return shared
            if not seat.store.usable or seat.store.replaced():
                raise BackendUnavailableError(f"{directory} was replaced or damaged while open; it is being reopened")
            if seat.store.read_only and not read_only:
                raise BackendUnavailableError(f"{directory} is open read-only in this process; close that first")
            seat.users += 1
            return seat.shared

    def release(self, store: Store, logger: logging.Logger) -> None:
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
            closer = threading.Thread(target=self._close, args=(key, seat), name="kvstore-nvme-close", daemon=True)
            closer.start()
        if not seat.closed.wait(_CLOSE_S):
            logger.warning("%s: closing takes longer than %g s and goes on behind", store.directory, _CLOSE_S)

    def _close(self, key: tuple[int, int], seat: _Seat) -> None:
        try:
            seat.store.close()
        finally:
            seat.closed.set()
            with self._lock:
                if self._seats.get(key) is seat:
                    del self._seats[key]

    def _watch_forks(self) -> None:
        if not self._hooked:
            os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)
            self._hooked = True

    def _stores(self) -> list[Store]:
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


REGISTRY: Final = Registry()
"""The one registry of this process, because what it guards (POSIX locks) belongs to the process."""
