"""What one opened backend knows: its options, the environment it joined, and its state of health."""

from __future__ import annotations

from typing import Final

import lmdb

from kvstore.backend import BackendContext
from kvstore.errors import ConfigError
from kvstore_lmdb import notes
from kvstore_lmdb.directory import check_file_system, prepare, resolve
from kvstore_lmdb.environment import TREES, Environment, join, leave
from kvstore_lmdb.errors import is_read_only, translate
from kvstore_lmdb.format import MAX_MAP_BYTES
from kvstore_lmdb.guard import GuardSettings
from kvstore_lmdb.options import DEFAULT_CAPACITY_BYTES, MIN_CAPACITY_BYTES, LmdbOptions, map_bytes
from kvstore_lmdb.shared_session import SharedSession
from kvstore_lmdb.writer import Writer

_MAX_READERS: Final = (1024, 65536)


class Session(SharedSession[Environment, Writer]):
    """One LMDB backend between open and close."""

    def __init__(self, context: BackendContext) -> None:
        """Check the options; touches nothing.

        Raises:
            ConfigError: An option is wrong.
        """
        options = context.options
        if not isinstance(options, LmdbOptions):
            raise ConfigError(f"tier {context.tier!r}: options must be LmdbOptions, not {options!r}")
        super().__init__(context, resolve(options.path))
        self._options: Final = options
        self.file_system = ""
        self._capacity_bytes = _capacity(context)
        self._settings = self._check_options()

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

    def _leave(self) -> None:
        environment, self.store, self.writer = self.store, None, None
        if environment is not None:
            environment.forget(id(self))
            leave(environment, self._log)

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
            environment = join(self.directory, settings, self._log)
        except (OSError, lmdb.Error) as e:
            if settings.read_only or not is_read_only(e):
                raise
            reading = GuardSettings(
                settings.map_bytes, settings.max_readers, len(TREES), settings.durability, read_only=True
            )
            environment = join(self.directory, reading, self._log)
            self._served_read_only()
        self.store = environment
        notes.check_format(environment)
        environment.env.reader_check()
        environment.listen(id(self), self._context.removed)

    def _agree_on_capacity(self) -> None:
        """The capacity lives in the store; another one named at open wins and is announced."""
        environment = self.store
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


def _capacity(context: BackendContext) -> int | None:
    capacity_bytes = context.capacity_bytes
    if capacity_bytes is not None and capacity_bytes < MIN_CAPACITY_BYTES:
        raise ConfigError(
            f"tier {context.tier!r}, option 'capacity': {capacity_bytes} bytes are less than {MIN_CAPACITY_BYTES}, "
            "the least that holds the trees of an LMDB store"
        )
    return capacity_bytes
