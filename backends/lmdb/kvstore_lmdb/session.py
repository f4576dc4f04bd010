"""What one opened backend knows: its options, the environment it joined, and its state of health."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

import lmdb

from kvstore.backend import BackendContext
from kvstore.errors import BackendError, BackendUnavailableError, ConfigError
from kvstore_lmdb import notes
from kvstore_lmdb.directory import check_file_system, describe_namespace, prepare, resolve
from kvstore_lmdb.environment import REGISTRY, TREES, Environment
from kvstore_lmdb.errors import is_damage, is_read_only, needs_reopen, translate
from kvstore_lmdb.format import MAX_MAP_BYTES
from kvstore_lmdb.guard import GuardSettings
from kvstore_lmdb.options import DEFAULT_CAPACITY_BYTES, MIN_CAPACITY_BYTES, LmdbOptions, map_bytes
from kvstore_lmdb.writer import Writer

_REOPEN_S: Final = 1.0  # between two attempts to open again
_LOG_S: Final = 60.0  # between two lines about the same trouble
_MAX_READERS: Final = (1024, 65536)


class Session:
    """One backend between open and close; rejoins the store when it was replaced underneath."""

    def __init__(self, context: BackendContext) -> None:
        """Check the options; touches nothing.

        Raises:
            ConfigError: An option is wrong.
        """
        if not isinstance(context.options, LmdbOptions):
            raise ConfigError(f"tier {context.tier!r}: options must be LmdbOptions, not {context.options!r}")
        self._context: Final = context
        self._options: Final = context.options
        self._log: Final = context.logger
        self.directory: Final = resolve(self._options.path)
        self.file_system = ""
        self.environment: Environment | None = None
        self.writer: Writer | None = None
        self._capacity_bytes = _capacity(context)
        self._settings = self._check_options()
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
        """Prepare the directory and join its environment.

        Raises:
            BackendError, ConfigError: See :meth:`kvstore.backend.Backend.open`.
        """
        self.file_system = check_file_system(
            self.directory, allow_network=self._options.allow_network_fs, logger=self._log
        )
        try:
            self._join()
            self._agree_on_capacity()
            self._describe_namespace()
        except BaseException as e:
            self._leave()
            if isinstance(e, (lmdb.Error, OSError)):
                raise translate(e, f"backend 'lmdb', option 'path': cannot open {self.directory}") from e
            raise

    def close(self) -> None:
        """Leave the environment for good."""
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        environment, self.environment, self.writer = self.environment, None, None
        if environment is not None:
            environment.forget(id(self))
            REGISTRY.release(environment, self._log)

    def writer_of(self, environment: Environment) -> Writer:
        """Return the writer that belongs to an entered environment.

        Raises:
            BackendUnavailableError: The store was reopened meanwhile.
        """
        writer = self.writer
        if writer is None or writer.environment is not environment:
            raise BackendUnavailableError(f"{self.directory} was reopened during the call")
        return writer

    def writable(self) -> bool:
        """Whether writes may be tried: not opened read-only, and not on a mount known to be so."""
        environment = self.environment
        if self._context.read_only or (environment is not None and environment.read_only):
            return False
        self._refused_writes = self._refused_writes and self._mounted_read_only()
        return not self._refused_writes

    def renew(self) -> None:
        """Leave an environment that was replaced, retired or opened read-only in need; join anew."""
        if self._renewing.acquire(blocking=False):
            try:
                self._renew()
            finally:
                self._renewing.release()

    def _renew(self) -> None:
        environment = self.environment
        if environment is not None:
            upgrade = environment.read_only and not self._context.read_only and not self._mounted_read_only()
            replaced = environment.usable and environment.replaced()
            if replaced:
                self._log.warning("%s was replaced while open; opening what is there now", environment.data)
            if replaced or upgrade:
                environment.retire(suspect=False)
            if environment.usable:
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

    def note_trouble(self, environment: Environment, error: Exception, doing: str) -> None:
        """React to a failed operation: remember a read-only mount, retire what is unusable, log seldom."""
        if is_read_only(error):
            self._refused_writes = True
        if needs_reopen(error):
            environment.retire(suspect=is_damage(error))
        self.log(type(error).__name__, "%s: %s failed: %s", self.directory, doing, error)

    def log(self, kind: str, message: str, *values: object) -> None:
        """Warn, once a minute for each kind of trouble."""
        now = time.monotonic()
        if now - self._logged.get(kind, -_LOG_S) >= _LOG_S:
            self._logged[kind] = now
            self._log.warning(message, *values)

    def _check_options(self) -> GuardSettings:
        options, capacity_bytes = self._options, self._capacity_bytes or DEFAULT_CAPACITY_BYTES
        low, high = _MAX_READERS
        if not low <= options.max_readers <= high:
            raise ConfigError(f"backend 'lmdb', option 'max_readers': {options.max_readers} is not in {low} to {high}")
        size = map_bytes(options, capacity_bytes)
        if not 2 * capacity_bytes <= size <= MAX_MAP_BYTES:
            raise ConfigError(
                f"backend 'lmdb', option 'map_size': {size} bytes are not between twice the capacity of "
                f"{capacity_bytes} and {MAX_MAP_BYTES}; leave the option out or change it"
            )
        context = self._context
        return GuardSettings(size, options.max_readers, len(TREES), context.durability, context.read_only)

    def _join(self) -> None:
        settings = self._settings
        try:
            if not settings.read_only:
                prepare(self.directory, self._log)
            environment = REGISTRY.acquire(self.directory, settings, self._log)
        except (OSError, lmdb.Error) as e:
            if settings.read_only or not is_read_only(e):
                raise
            reading = GuardSettings(
                settings.map_bytes, settings.max_readers, len(TREES), settings.durability, read_only=True
            )
            environment = REGISTRY.acquire(self.directory, reading, self._log)
            self.log("read-only", "%s is mounted read-only: records are served, puts are refused", self.directory)
        self.environment = environment
        notes.check_format(environment)
        environment.env.reader_check()
        environment.listen(id(self), self._context.removed)

    def _agree_on_capacity(self) -> None:
        """The capacity lives in the store; another one named at open wins and is announced."""
        environment = self.environment
        if environment is None:
            return
        with environment.env.begin() as txn:
            stored = notes.stored_capacity(environment, txn)
        wanted = self._capacity_bytes or stored or DEFAULT_CAPACITY_BYTES
        self.writer = Writer(environment, wanted)
        if environment.read_only or self._context.read_only or wanted == stored:
            return
        notes.store_capacity(environment, wanted)
        if stored is not None:
            self._log.warning("%s: capacity changed from %d to %d bytes", self.directory, stored, wanted)

    def _describe_namespace(self) -> None:
        environment, context = self.environment, self._context
        if environment is None or environment.read_only or context.read_only or not context.namespace:
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


def _capacity(context: BackendContext) -> int | None:
    capacity_bytes = context.capacity_bytes
    if capacity_bytes is not None and capacity_bytes < MIN_CAPACITY_BYTES:
        raise ConfigError(
            f"tier {context.tier!r}, option 'capacity': {capacity_bytes} bytes are less than {MIN_CAPACITY_BYTES}, "
            "the least that holds the trees of an LMDB store"
        )
    return capacity_bytes
