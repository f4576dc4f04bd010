"""Guarded open: never hand liblmdb a file that could kill the process.

``lmdb.open`` on a truncated or damaged file ends in SIGBUS or an abort, at every restart anew.
:func:`open_guarded` lets one process at a time judge the file from outside, sets aside what is
damaged, restores a cut-off length, and only then maps it.  Any index kept in LMDB can use it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb

from kvstore.errors import BackendPermissionError, BackendUnavailableError, ConfigError
from kvstore_lmdb import format as lmdb_format
from kvstore_lmdb.check import FileCheck, UndecidedError
from kvstore_lmdb.directory import regular_file, sync_directory
from kvstore_lmdb.disk_blocks import extend
from kvstore_lmdb.errors import is_damage
from kvstore_lmdb.format import DamagedError, Meta, read_meta
from kvstore_lmdb.quarantine import set_aside
from kvstore_lmdb.statefile import State, StateFile, boot_id

DATA_NAME: Final = "data.mdb"
LOCK_NAME: Final = "lock.mdb"
_DOOR_S: Final = 5.0  # longest wait for another process that opens or closes
_LEAVE_S: Final = 1.0
_SHORT_CHECK_S: Final = 1.5  # after kill -9 the kernel still holds every write: a sample is enough
_LONG_CHECK_S: Final = 3.5  # open stays within 5 s; about 1M records
_CUT_FACTOR: Final = 16  # a file cut to less than that part of itself, and by more than ...
_CUT_BYTES: Final = 1 << 30  # ... that, is not worth the memory and the disk space of giving it back its length
_READER_BYTES: Final = 64  # a cache line per reader
_TABLE_HEAD_BYTES: Final = 1024  # header and mutexes, generously: a longer file only means more slots
_ENGINE: Final[dict[str, Any]] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """How to open an environment.

    Attributes:
        map_bytes: Size of the map; a larger one found in the file wins.
        max_readers: Reader slots, for all processes together.
        max_trees: Named trees.
        durability: ``"cache"`` (no sync) or ``"durable"`` (every commit reaches the medium).
        read_only: Change nothing; damage is an error instead of a cold start.
    """

    map_bytes: int
    max_readers: int
    max_trees: int
    durability: str = "cache"
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class GuardedEnvironment:
    """An open environment with its seat in the state file.

    Attributes:
        env: The environment.
        state: This process's descriptor of the state file; None on read-only media without one.
        data: Path of the data file.
        read_only: Whether writes are impossible.
        durability: Mode it was opened in.
        identity: Device and inode of the data file that is mapped.
        opened_bytes: Length of the data file when it was opened.
    """

    env: lmdb.Environment
    state: StateFile | None
    data: Path
    read_only: bool
    durability: str
    identity: tuple[int, int]
    opened_bytes: int


def open_guarded(directory: Path, settings: GuardSettings, logger: logging.Logger) -> GuardedEnvironment:
    """Judge, repair or set aside, then open.  Takes at most about 5 s plus the wait for others.

    The caller makes sure that this process has the directory open once only.

    Raises:
        BackendError: It cannot be opened; the message says what to do.
        ConfigError: Another process uses another durability.
        OSError, lmdb.Error: The system refused.
    """
    state = _state_file(directory, settings)
    if state is None:
        return _open(directory, settings, None, logger)
    try:
        state.enter_door(_DOOR_S)
        return _open(directory, settings, state, logger)
    except BaseException:
        state.close()
        raise


def close_guarded(opened: GuardedEnvironment, *, suspect: bool = False) -> None:
    """Bring everything to the medium, close, and note a clean close if nobody else has it open.

    Args:
        opened: What :func:`open_guarded` returned; unusable afterwards.
        suspect: liblmdb reported damage: have the next opener check the file.
    """
    state = opened.state
    try:
        if state is None or opened.read_only:
            opened.env.close()
            return
        if not suspect:
            opened.env.sync(True)  # noqa: FBT003 - positional in every py-lmdb
        state.enter_door(_LEAVE_S)
        opened.env.close()
        state.stand_up()
        prior = state.read()
        if suspect:
            state.write(State("suspect"))
        elif prior is not None and prior.phase == "open" and state.alone():
            _mark_clean(opened, state, prior.durability)
    except (OSError, lmdb.Error, BackendUnavailableError):
        opened.env.close()  # the state stays "open": the next opener checks
    finally:
        if state is not None:
            state.close()


def _mark_clean(opened: GuardedEnvironment, state: StateFile, durability: str) -> None:
    """Stamp the data file with an odd time and remember it: any later write changes the stamp."""
    found = opened.data.lstat()
    if (found.st_dev, found.st_ino) == opened.identity:
        stamp = time.time_ns() // 1_000_000 * 1_000_000 + secrets.randbelow(1_000_000)
        os.utime(opened.data, ns=(stamp, stamp), follow_symlinks=False)
        found = opened.data.lstat()
        state.write(State("clean", boot_id(), durability, found.st_size, found.st_mtime_ns, found.st_ino))


def _state_file(directory: Path, settings: GuardSettings) -> StateFile | None:
    try:
        return StateFile(directory, create=not settings.read_only)
    except FileNotFoundError:
        return None


def _open(
    directory: Path, settings: GuardSettings, state: StateFile | None, logger: logging.Logger
) -> GuardedEnvironment:
    data = directory / DATA_NAME
    alone = state is not None and state.alone()
    prior = state.read() if state is not None else None
    in_use = not alone and prior is not None and prior.phase == "open" and not settings.read_only
    if in_use and prior is not None and prior.durability != settings.durability:
        raise ConfigError(
            f"backend 'lmdb', option 'durability': {directory} is open in another process with "
            f"durability = {prior.durability!r}; use the same value everywhere"
        )
    vet = _Vet(data, prior, settings, logger)
    meta = vet.run() if alone or state is None else vet.glance()
    _reserve_lock_file(directory / LOCK_NAME, settings)
    try:
        env = _map(directory, settings, meta)
    except lmdb.Error as e:
        if not alone or settings.read_only or not is_damage(e):
            raise
        vet.quarantine(str(e))
        _reserve_lock_file(directory / LOCK_NAME, settings)
        env = _map(directory, settings, None)
    try:
        env.reader_check()  # killed processes keep their slots, and whoever opens needs one
        if meta is None and settings.durability == "durable" and not settings.read_only:
            sync_directory(directory)  # the names of the new files
        if state is not None:
            if not settings.read_only and (alone or prior is None or prior.phase == "clean"):
                state.write(State("open", boot_id(), settings.durability))
            state.share()
            state.leave_door()
        return _opened(env, data, settings, state)
    except BaseException:
        env.close()
        raise


def _reserve_lock_file(lock: Path, settings: GuardSettings) -> None:
    """Give the reader table its disk blocks.

    liblmdb maps the table writable over a sparse file: on a full disk the first store into it is a
    SIGBUS.  Here the lack of room is an error.
    """
    wanted = settings.max_readers * _READER_BYTES + _TABLE_HEAD_BYTES
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        if settings.read_only and e.errno == errno.EROFS:
            return  # liblmdb does without the table there
        raise
    try:
        extend(fd, wanted)
    finally:
        os.close(fd)


def _map(directory: Path, settings: GuardSettings, meta: Meta | None) -> lmdb.Environment:
    """Open for real; never a writable map, never without readahead, never without locks."""
    durable = settings.durability == "durable"
    return lmdb.open(
        str(directory),
        map_size=max(settings.map_bytes, meta.map_bytes if meta else 0),
        max_readers=settings.max_readers,
        max_dbs=settings.max_trees,
        subdir=True,
        readonly=settings.read_only,
        create=not settings.read_only,
        mode=0o600,
        sync=durable,
        metasync=False,
        **_ENGINE,
    )


def _opened(env: lmdb.Environment, data: Path, settings: GuardSettings, state: StateFile | None) -> GuardedEnvironment:
    found = data.lstat()
    if not settings.read_only:
        for path in (data, data.with_name(LOCK_NAME)):
            path.chmod(0o600)  # whatever the umask says
    identity = (found.st_dev, found.st_ino)
    return GuardedEnvironment(env, state, data, settings.read_only, settings.durability, identity, found.st_size)


class _Vet:
    """Judges one data file before it is mapped."""

    def __init__(self, data: Path, prior: State | None, settings: GuardSettings, logger: logging.Logger) -> None:
        self._data: Final = data
        self._prior: Final = prior
        self._read_only: Final = settings.read_only
        self._log: Final = logger

    def glance(self) -> Meta | None:
        """Look at a file that other processes use right now: it works for them."""
        found = regular_file(self._data)
        regular_file(self._data.with_name(LOCK_NAME))
        if found is None or found.st_size == 0:
            return None
        try:
            return self._judge(found, walk=False)
        except DamagedError as e:
            raise BackendUnavailableError(
                f"{self._data} is damaged ({e}) while other processes use it; stop them and open again"
            ) from e

    def run(self) -> Meta | None:
        """Judge the file; None when there is nothing to map yet.

        Raises:
            BackendUnavailableError: Nothing is there, or it is damaged, and we must not change that.
            BackendPermissionError: It is a link, or unreadable and not ours.
        """
        self._vet_lock_file()
        found = regular_file(self._data)
        if found is None or (found.st_size == 0 and stat.S_ISREG(found.st_mode)):
            if self._read_only:
                raise BackendUnavailableError(f"{self._data.parent} holds no LMDB store to read")
            return None
        try:
            if not stat.S_ISREG(found.st_mode):
                raise DamagedError("it is not a regular file")  # noqa: TRY301 - one place decides what damage means
            return self._judge(found, walk=not (self._prior is not None and self._prior.matches(found)))
        except DamagedError as e:
            self.quarantine(str(e))
            return None

    def quarantine(self, reason: str) -> None:
        """Set the data file aside and say so once.

        Raises:
            BackendUnavailableError: We were asked to change nothing.
        """
        if self._read_only:
            raise BackendUnavailableError(f"{self._data} is damaged: {reason}; open it writable once to start cold")
        kept = set_aside(self._data)
        self._data.with_name(LOCK_NAME).unlink(missing_ok=True)
        self._log.warning("%s was damaged (%s); kept as %s, starting cold", self._data, reason, kept.name)

    def _vet_lock_file(self) -> None:
        """A lock file of our own is rebuilt by liblmdb; anything but a file would stop it."""
        lock = self._data.with_name(LOCK_NAME)
        found = regular_file(lock)
        if found is not None and not stat.S_ISREG(found.st_mode) and not self._read_only:
            set_aside(lock)

    def _judge(self, found: os.stat_result, *, walk: bool) -> Meta:
        if not lmdb_format.SUPPORTED:
            raise BackendUnavailableError("the LMDB backend needs a 64-bit little-endian machine")
        fd = self._descriptor()
        try:
            meta = read_meta(fd)
            if meta.file_bytes > _CUT_FACTOR * found.st_size + _CUT_BYTES:
                raise DamagedError(f"it claims {meta.file_bytes} bytes, of which {found.st_size} are there")
            if walk:
                self._walk(fd, meta)
            if found.st_size < meta.file_bytes:
                if self._read_only:
                    raise DamagedError(f"{found.st_size} bytes of {meta.file_bytes} are left")
                self._lengthen(meta.file_bytes)
            return meta
        finally:
            os.close(fd)

    def _lengthen(self, wanted_bytes: int) -> None:
        """Restore the length with zeros, which the records' own checksums tell; blocks, not a hole."""
        fd = os.open(self._data, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            extend(fd, wanted_bytes)
        finally:
            os.close(fd)

    def _walk(self, fd: int, meta: Meta) -> None:
        """Check the whole file where its last close does not vouch for it."""
        prior = self._prior
        killed = prior is not None and prior.phase == "open" and prior.same_boot
        trusted = killed or (prior is not None and prior.phase == "open" and prior.durability == "durable")
        try:
            FileCheck(fd, meta, _SHORT_CHECK_S if killed else _LONG_CHECK_S).run()
        except UndecidedError:
            if not trusted:
                raise DamagedError("it changed while closed, or power was lost, and is too large to check") from None

    def _descriptor(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._data, flags)
        except PermissionError as e:
            if not self._read_only:
                try:
                    self._data.chmod(0o600)  # it is ours if this works
                    return os.open(self._data, flags)
                except OSError:
                    pass
            raise BackendPermissionError(f"{self._data} cannot be read: {e.strerror}; give it back its owner") from e
