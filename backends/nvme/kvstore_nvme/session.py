"""What one opened backend knows: its options, the store it joined, and its state of health."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Final

from kvstore_lmdb.directory import describe_namespace, prepare

from kvstore.backend import BackendContext
from kvstore.errors import BackendError, BackendUnavailableError, ConfigError
from kvstore_nvme.directory import check_file_system, resolve
from kvstore_nvme.errors import Failure, is_damage, is_read_only, needs_reopen, translate
from kvstore_nvme.opening import StoreSettings, open_store
from kvstore_nvme.options import MIN_CAPACITY_BYTES, NvmeOptions
from kvstore_nvme.registry import REGISTRY
from kvstore_nvme.shared import Shared
from kvstore_nvme.store import Store
from kvstore_nvme.writer import Writer

_SCAN_S: Final = 2.0  # of entering unknown records at open; the rest follows in the background
_REOPEN_S: Final = 1.0  # between two attempts to open again
_LOG_S: Final = 60.0  # between two lines about the same trouble


class Session:
    """One backend between open and close; rejoins the store when it was replaced underneath."""

    def __init__(self, context: BackendContext) -> None:
        """Check the options; touches nothing.

        Raises:
            ConfigError: An option is wrong.
        """
        options = context.options
        if not isinstance(options, NvmeOptions):
            raise ConfigError(f"tier {context.tier!r}: options must be NvmeOptions, not {options!r}")
        capacity = context.capacity_bytes
        if capacity is not None and capacity < MIN_CAPACITY_BYTES:
            raise ConfigError(
                f"tier {context.tier!r}, option 'capacity': {capacity} bytes are less than {MIN_CAPACITY_BYTES}, "
                "the least that holds the index and two regions"
            )
        self._context: Final = context
        self._options: Final = options
        self._log: Final = context.logger
        self.directory: Final = resolve(options.path)
        self.durable: Final = context.durability == "durable"
        self.file_system = ""
        self.store: Store | None = None
        self._writer: Writer | None = None
        self._settings: Final = StoreSettings(
            capacity, context.block_bytes, options.region_bytes, options.direct, context.read_only
        )
        self._pid: Final = os.getpid()
        self._renewing: Final = threading.Lock()
        self._closed = False
        self._refused_writes = False
        self._next_open = 0.0
        self._failed_opens = 0
        self._logged: dict[str, float] = {}

    @property
    def inherited(self) -> bool:
        """Whether the process was forked since the session was opened."""
        return self._pid != os.getpid()

    def open(self) -> None:
        """Prepare the directory and join its store.

        Raises:
            BackendError, ConfigError: See :meth:`kvstore.backend.Backend.open`.
        """
        self.file_system = check_file_system(
            self.directory, allow_network=self._options.allow_network_fs, logger=self._log
        )
        try:
            self._join()
        except BaseException as e:
            self._leave()
            if isinstance(e, Failure):
                raise translate(e, f"backend 'nvme', option 'path': cannot open {self.directory}") from e
            raise

    def close(self) -> None:
        """Leave the store for good."""
        self._closed = True
        self._leave()

    def writer_of(self, store: Store) -> Writer:
        """Return the writer that belongs to an entered store.

        Raises:
            BackendUnavailableError: The store was reopened meanwhile.
        """
        writer = self._writer
        if writer is None or writer.store is not store:
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

    def note_trouble(self, store: Store, error: Exception, doing: str) -> None:
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

    def _join(self) -> None:
        settings = self._settings
        try:
            if not settings.read_only:
                prepare(self.directory, self._log, backend="nvme")
            shared = self._acquire(settings)
        except Failure as e:
            if settings.read_only or not is_read_only(e):
                raise
            shared = self._acquire(replace(settings, read_only=True))
            self.log("read-only", "%s is mounted read-only: records are served, puts are refused", self.directory)
        store, self._writer = shared.store, shared.writer
        self.store = store
        store.listen(id(self), self._context.removed)
        if not store.read_only and self._context.namespace:
            try:
                describe_namespace(self.directory, self._context.namespace, self._context.namespace_json)
            except OSError as e:
                self.log("namespace", "%s: the namespace's description was not written: %s", self.directory, e)

    def _acquire(self, settings: StoreSettings) -> Shared:
        if settings.read_only and not self.directory.is_dir():
            raise BackendUnavailableError(f"{self.directory} holds no NVMe store to read")

        def make() -> Shared:
            shared = Shared.of(open_store(self.directory, settings, self._log))
            try:
                if shared.writer is not None:
                    shared.writer.maintain(time.monotonic() + _SCAN_S)
            except BaseException:
                shared.store.close()
                raise
            return shared

        return REGISTRY.acquire(self.directory, make, read_only=settings.read_only)

    def _leave(self) -> None:
        store, self.store, self._writer = self.store, None, None
        if store is not None:
            store.forget(id(self))
            REGISTRY.release(store, self._log)

    def _mounted_read_only(self) -> bool:
        try:
            return bool(os.statvfs(self.directory).f_flag & os.ST_RDONLY)
        except OSError:
            return False
