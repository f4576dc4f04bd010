"""Putting a store together: anchor, index and segment files, new, known, damaged or cut by a power loss."""

from __future__ import annotations

import logging
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore_lmdb.directory import regular_file
from kvstore_lmdb.guard import DATA_NAME, LOCK_NAME, GuardedEnvironment, GuardSettings, close_guarded, open_guarded
from kvstore_lmdb.quarantine import set_aside
from kvstore_lmdb.statefile import STATE_NAME, StateFile

from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore_nvme.directory import direct_works, private_folder
from kvstore_nvme.epochs import load_epochs
from kvstore_nvme.geometry import (
    ANCHOR_NAME,
    Geometry,
    choose,
    count_regions,
    index_budget,
    read_anchor,
    slot_bytes,
    write_anchor,
)
from kvstore_nvme.index import TREES, UNSCANNED, Index, Row, Trees
from kvstore_nvme.locks import Locks
from kvstore_nvme.options import DEFAULT_CAPACITY_BYTES
from kvstore_nvme.segments import Segments, segment_files
from kvstore_nvme.store import Opened, Store

INDEX_NAME: Final = "index"
_DOOR_S: Final = 5.0
_MAX_READERS: Final = 512  # one for each thread that reads, over all processes
_LEAST_MAP_BYTES: Final = 1 << 30  # address space only


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What an opener wants.

    Attributes:
        capacity_bytes: Bound; None keeps the store's.
        block_bytes: Raw bytes of a block; 0 when unknown.
        region_bytes: The option.
        direct: The option.
        read_only: Change nothing.
    """

    capacity_bytes: int | None
    block_bytes: int
    region_bytes: int | None
    direct: bool | None
    read_only: bool


def open_store(directory: Path, settings: StoreSettings, logger: logging.Logger) -> Store:
    """Open or make the store of a directory; this process has it open once only.

    Raises:
        BackendError: It cannot be used; the message says what to do.
        ConfigError: An option does not fit it.
        OSError, lmdb.Error: The system refused.
    """
    if settings.read_only:
        return _Opening(directory, settings, None, logger).run(alone=False)
    locks = Locks(directory)
    try:
        locks.enter_door(_DOOR_S)
        store = _Opening(directory, settings, locks, logger).run(alone=locks.alone())
        locks.share()
        locks.leave_door()
    except BaseException:
        locks.close()
        raise
    return store


class _Opening:
    """One attempt, inside the door unless read-only."""

    def __init__(self, directory: Path, settings: StoreSettings, locks: Locks | None, logger: logging.Logger) -> None:
        self._directory: Final = directory
        self._settings: Final = settings
        self._locks: Final = locks
        self._log: Final = logger

    def run(self, *, alone: bool) -> Store:
        directory, settings = self._directory, self._settings
        segment_files(directory)  # refuses links
        folder = private_folder(directory / INDEX_NAME, create=self._locks is not None)
        if alone:
            _forget_after_power_loss(folder, self._log)
        geometry = self._geometry(alone=alone)
        guarded = self._open_index(folder)
        segments: Segments | None = None
        try:
            trees = Trees(*(guarded.env.open_db(name, create=not settings.read_only) for name in TREES))
            segments = self._segments(geometry)
            found = (directory / ANCHOR_NAME).lstat()
            anchor = (found.st_dev, found.st_ino)
            store = Store(Opened(directory, guarded, trees, segments, self._locks, settings.block_bytes, anchor))
            if self._locks is not None:
                self._agree(store)
        except BaseException:
            close_guarded(guarded)
            if segments is not None:
                segments.close()
            raise
        return store

    def _geometry(self, *, alone: bool) -> Geometry:
        """Read the anchor, or make a new store where there is none."""
        directory = self._directory
        geometry = read_anchor(directory)
        if geometry is not None:
            return self._fitting(geometry, alone=alone)
        if self._locks is None:
            raise BackendUnavailableError(f"{directory} holds no NVMe store to read")
        anchor, files = directory / ANCHOR_NAME, segment_files(directory)
        if files and regular_file(anchor) is None:
            raise BackendUnavailableError(
                f"{directory} holds {min(files.values()).name} but no {ANCHOR_NAME}: either it is not a store, or that "
                "file was deleted; name another directory, or delete the seg- files"
            )
        if not alone:
            raise BackendUnavailableError(f"{anchor} is damaged while other processes use the store; stop them first")
        if regular_file(anchor) is not None:
            kept = set_aside(anchor)
            self._log.warning("%s was damaged; kept as %s, starting cold", anchor, kept.name)
        return self._make_new()

    def _make_new(self) -> Geometry:
        settings = self._settings
        capacity = settings.capacity_bytes or DEFAULT_CAPACITY_BYTES
        geometry = choose(capacity, settings.block_bytes, settings.region_bytes)
        for path in segment_files(self._directory).values():
            path.unlink()
        _remove_index(self._directory / INDEX_NAME)
        write_anchor(self._directory, geometry)
        return geometry

    def _fitting(self, geometry: Geometry, *, alone: bool) -> Geometry:
        """Check that a store can serve the blocks and the capacity asked for."""
        settings = self._settings
        if settings.read_only:
            return geometry
        capacity = settings.capacity_bytes
        if capacity is not None and count_regions(geometry, capacity, index_budget(capacity, settings.block_bytes)) < 2:
            if not alone:
                raise ConfigError(
                    f"backend 'nvme', option 'capacity': {capacity} bytes do not hold two of the regions of "
                    f"{geometry.region_bytes} bytes that {self._directory} is made of, and other processes use it"
                )
            self._log.warning("%s is made anew: its regions do not fit %d bytes", self._directory, capacity)
            return self._make_new()
        if slot_bytes(settings.block_bytes) > geometry.region_bytes:
            raise ConfigError(
                f"backend 'nvme', option 'path': the regions of {self._directory} have {geometry.region_bytes} bytes, "
                f"a block of {settings.block_bytes} bytes does not fit; name another directory or delete this one"
            )
        return geometry

    def _open_index(self, folder: Path) -> GuardedEnvironment:
        settings = self._settings
        capacity = settings.capacity_bytes or DEFAULT_CAPACITY_BYTES
        size = max(_LEAST_MAP_BYTES, 4 * index_budget(capacity, settings.block_bytes))
        # Always without sync: after a power cut the index is made anew from the slots, and they were synced.
        guard = GuardSettings(size, _MAX_READERS, len(TREES), "cache", settings.read_only)
        return open_guarded(folder, guard, self._log)

    def _segments(self, geometry: Geometry) -> Segments:
        wanted = self._settings.direct
        direct = wanted is not False and direct_works(self._directory)
        if wanted and not direct:
            raise ConfigError(
                f"backend 'nvme', option 'direct': the file system of {self._directory} refuses direct I/O; leave the "
                "option out to use the page cache there"
            )
        uncached = wanted is None and not direct
        writable = self._locks is not None
        return Segments(self._directory, geometry, direct=direct, uncached=uncached, writable=writable)

    def _agree(self, store: Store) -> None:
        """Settle the capacity; enter the regions of files that a new index does not know."""
        index, settings = store.index, self._settings
        with store.reading() as txn:
            stored = index.budget(txn)
        capacity = settings.capacity_bytes or (stored[0] if stored else DEFAULT_CAPACITY_BYTES)
        wanted = index_budget(capacity, settings.block_bytes)
        if stored is not None and stored[0] == capacity:
            wanted = max(wanted, stored[1])
        if stored == (capacity, wanted):
            return
        with store.writing() as txn:
            if stored is None:
                self._enter_unknown(store, index, txn)
            index.set_budget(txn, capacity, wanted)
        if stored is not None and stored[0] != capacity:
            self._log.warning("%s: capacity changed from %d to %d bytes", self._directory, stored[0], capacity)

    def _enter_unknown(self, store: Store, index: Index, txn: object) -> None:
        files = segment_files(self._directory)
        if files:
            self._log.warning("%s: making the index anew from the records", self._directory)
        geometry = store.geometry
        index.tick(txn, time.time_ns() // 1000)
        for number, path in files.items():
            regions = path.lstat().st_size // geometry.region_bytes
            for k in range(min(regions, geometry.segment_regions)):
                index.set_row(txn, number * geometry.segment_regions + k, Row(UNSCANNED))
        for namespace, epoch in load_epochs(self._directory).items():
            index.set_epoch(txn, namespace, epoch)


def _forget_after_power_loss(folder: Path, logger: logging.Logger) -> None:
    """Remove an index that was open when another boot ended: pages of it may never have been written."""
    if regular_file(folder / STATE_NAME) is None:
        return
    state = StateFile(folder)
    try:
        prior = state.read()
    finally:
        state.close()
    if prior is not None and prior.phase == "open" and prior.boot and not prior.same_boot:
        logger.warning("%s was in use when the machine went down", folder.parent)
        _remove_index(folder)


def _remove_index(folder: Path) -> None:
    for name in (DATA_NAME, LOCK_NAME):
        path = folder / name
        if path.exists() and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
