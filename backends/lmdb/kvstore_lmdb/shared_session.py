"""What a backend on a shared store knows between open and close: which store it joined, and its health."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from kvstore.backend import BackendContext
from kvstore.errors import BackendError, BackendUnavailableError, ConfigError
from kvstore_lmdb.directory import describe_namespace
from kvstore_lmdb.errors import is_damage, is_read_only, needs_reopen
from kvstore_lmdb.shared_stores import Joinable

_REOPEN_S: Final = 1.0  # between two attempts to open again
_LOG_S: Final = 60.0  # between two lines about the same trouble


class Retirable(Joinable, Protocol):
    """A store that its users can take out of service."""

    def retire(self, *, suspect: bool) -> None:
        """Let no operation start any more; ``suspect`` when it may be damaged."""


StoreT = TypeVar("StoreT", bound=Retirable)
WriterT = TypeVar("WriterT")


class SharedSession(ABC, Generic[StoreT, WriterT]):
    """One backend between open and close; rejoins the store when it was replaced underneath.

    Thread-safe.  ``store`` and ``writer`` belong together: a subclass sets and drops them at once.

    Args:
        context: What the backend was opened with.
        directory: Where the store is.
    """

    def __init__(self, context: BackendContext, directory: Path) -> None:
        self._context: Final = context
        self._log: Final = context.logger
        self.directory: Final = directory
        self.store: StoreT | None = None
        self.writer: WriterT | None = None
        self._pid: Final = os.getpid()
        self._renewing: Final = threading.Lock()
        self._closed = False
        self._refused_writes = False
        self._next_open = 0.0
        self._failed_opens = 0
        self._logged: dict[str, float] = {}

    @abstractmethod
    def open(self) -> None:
        """Prepare the directory and join its store.

        Raises:
            BackendError, ConfigError: See :meth:`kvstore.backend.Backend.open`.
        """

    @abstractmethod
    def _leave(self) -> None:
        """Let go of the store, if one was joined."""

    @property
    def inherited(self) -> bool:
        """Whether the process was forked since the session was opened."""
        return self._pid != os.getpid()

    def close(self) -> None:
        """Leave the store for good."""
        self._closed = True
        self._leave()

    def writer_of(self, store: StoreT) -> WriterT:
        """Return the writer that belongs to an entered store.

        Raises:
            BackendUnavailableError: The store was reopened meanwhile.
        """
        writer = self.writer
        if writer is None or self.store is not store:
            raise BackendUnavailableError(f"{self.directory} was reopened during the call")
        return writer

    def writable(self) -> bool:
        """Whether writes may be tried: not opened read-only, and not on a mount known to be so."""
        store = self.store
        if self._context.read_only or (store is not None and store.read_only):
            return False
        self._refused_writes = self._refused_writes and self._mounted_read_only()
        return not self._refused_writes

    def renew(self) -> None:
        """Leave a store that was replaced, retired or opened read-only in need; join anew."""
        if self._renewing.acquire(blocking=False):
            try:
                self._renew()
            finally:
                self._renewing.release()

    def note_trouble(self, store: StoreT, error: Exception, doing: str) -> None:
        """React to a failed operation: remember a read-only mount, retire what is unusable, log seldom."""
        if is_read_only(error):
            self._refused_writes = True
        if needs_reopen(error):
            store.retire(suspect=is_damage(error))
        self.log(type(error).__name__, "%s: %s failed: %s", self.directory, doing, error)

    def log(self, kind: str, message: str, *values: object) -> None:
        """Warn, once a minute for each kind of trouble."""
        now = time.monotonic()
        if now - self._logged.get(kind, -_LOG_S) >= _LOG_S:
            self._logged[kind] = now
            self._log.warning(message, *values)

    def _renew(self) -> None:
        store = self.store
        if store is not None:
            upgrade = store.read_only and not self._context.read_only and not self._mounted_read_only()
            replaced = store.usable and store.replaced()
            if replaced:
                self._log.warning("%s was replaced while open; opening what is there now", self.directory)
            if replaced or upgrade:
                store.retire(suspect=False)
            if store.usable:
                return
            self._leave()
        if self._closed or time.monotonic() < self._next_open:
            return
        self._next_open = time.monotonic() + _REOPEN_S
        try:
            self.open()
            self._failed_opens = 0
        except (BackendError, ConfigError) as e:
            self._failed_opens += 1
            if self._failed_opens > 1:  # the first may only wait for another backend of this process to leave
                self.log("reopen", "%s cannot be opened again: %s", self.directory, e)

    def _served_read_only(self) -> None:
        self.log("read-only", "%s is mounted read-only: records are served, puts are refused", self.directory)

    def _describe_namespace(self) -> None:
        """Keep the readable copy of the namespace beside the data; a failure costs only that."""
        store, context = self.store, self._context
        if store is None or store.read_only or context.read_only or not context.namespace:
            return
        try:
            describe_namespace(self.directory, context.namespace, context.namespace_json)
        except OSError as e:
            self.log("namespace", "%s: the namespace's description was not written: %s", self.directory, e)

    def _mounted_read_only(self) -> bool:
        try:
            return bool(os.statvfs(self.directory).f_flag & os.ST_RDONLY)
        except OSError:
            return False
