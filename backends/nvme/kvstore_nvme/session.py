"""What one opened backend knows: its options, the store it joined, and its state of health."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from kvstore_lmdb.directory import prepare
from kvstore_lmdb.shared_session import SharedSession
from kvstore_lmdb.shared_stores import check_joinable

from kvstore.backend import BackendContext
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore_nvme.directory import check_file_system, resolve
from kvstore_nvme.errors import Failure, is_read_only, translate
from kvstore_nvme.opening import StoreSettings, open_store
from kvstore_nvme.options import MIN_CAPACITY_BYTES, NvmeOptions
from kvstore_nvme.shared import STORES, Shared
from kvstore_nvme.store import Store
from kvstore_nvme.writer import Writer

_SCAN_S: Final = 2.0  # of entering unknown records at open; the rest follows in the background


class Session(SharedSession[Store, Writer]):
    """One segment-store backend between open and close."""

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
        super().__init__(context, resolve(options.path))
        self._options: Final = options
        self.durable: Final = context.durability == "durable"
        self.file_system = ""
        self._shared: Shared | None = None
        self._settings: Final = StoreSettings(
            capacity, context.block_bytes, options.region_bytes, options.direct, context.read_only
        )

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
            self._served_read_only()
        self._shared, self.store, self.writer = shared, shared.store, shared.writer
        shared.store.listen(id(self), self._context.removed)
        self._describe_namespace()

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

        def check(shared: Shared) -> None:
            check_joinable(shared.store, self.directory, read_only=settings.read_only)

        return STORES.acquire(self.directory, make, check)

    def _leave(self) -> None:
        shared, self._shared, self.store, self.writer = self._shared, None, None, None
        if shared is not None:
            shared.store.forget(id(self))
            STORES.release(shared, self.directory, self._log)
