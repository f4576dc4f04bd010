"""``kvstore.state``: who uses a directory now, and whether its last user closed it cleanly.

One small file serves both questions.  Byte ranges far beyond its end carry POSIX locks: the *door*
is held while opening or closing, the *seat* is shared by every process that has the database open.
POSIX locks die with their process and are not inherited over a fork, which is what is wanted; they
also vanish when the process closes any descriptor of the file, so a process keeps exactly one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from kvstore.errors import BackendPermissionError, BackendUnavailableError

STATE_NAME: Final = "kvstore.state"
_VERSION: Final = 1
_DOOR: Final = 1 << 30
_SEAT: Final = (1 << 30) + 1
_MAX_BYTES: Final = 4096
_POLL_S: Final = 0.005
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

Phase = Literal["open", "clean", "suspect"]


def boot_id() -> str:
    """Return the kernel's id of this boot; empty where there is none, which equals nothing."""
    try:
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class State:
    """What the file says.

    Attributes:
        phase: ``clean`` after an orderly last close, ``suspect`` after liblmdb met damage.
        boot: Boot during which this was written.
        durability: Mode of the processes that have it open.
        file_bytes: Size of the data file at a clean close.
        mtime_ns: Modification time given to the data file at a clean close.
        inode: Inode of the data file at a clean close.
    """

    phase: Phase
    boot: str = ""
    durability: str = "cache"
    file_bytes: int = 0
    mtime_ns: int = 0
    inode: int = 0

    @property
    def same_boot(self) -> bool:
        """Whether the page cache that took the last writes is still this kernel's."""
        return bool(self.boot) and self.boot == boot_id()

    def matches(self, found: os.stat_result) -> bool:
        """Whether the data file is untouched since the clean close that wrote this."""
        seen = (found.st_size, found.st_mtime_ns, found.st_ino)
        return self.phase == "clean" and seen == (self.file_bytes, self.mtime_ns, self.inode)


class StateFile:
    """The one descriptor this process keeps on a directory's state file."""

    def __init__(self, directory: Path, *, create: bool = True) -> None:
        """Open the file; without ``create`` it must exist and may be unwritable.

        Raises:
            BackendPermissionError: It is a symbolic link.
            OSError: It cannot be opened.
        """
        self.path: Final = directory / STATE_NAME
        self._writable = True
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(self.path, flags | os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
            if create:
                os.fchmod(self._fd, 0o600)  # whatever the umask says
        except OSError as e:
            if e.errno == errno.ELOOP:
                raise BackendPermissionError(f"{self.path} is a symbolic link; remove it") from e
            if create or e.errno not in {errno.EROFS, errno.EACCES, errno.EPERM}:
                raise
            self._fd = os.open(self.path, flags | os.O_RDONLY)
            self._writable = False

    def close(self) -> None:
        """Close the descriptor; every lock of this process on the file ends."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def enter_door(self, timeout_s: float) -> None:
        """Wait to be the only process that opens or closes the database.

        Raises:
            BackendUnavailableError: Another process stayed in the door for ``timeout_s``.
        """
        end = time.monotonic() + timeout_s
        while not self._try_lock(_DOOR, exclusive=self._writable):
            if time.monotonic() > end:
                raise BackendUnavailableError(
                    f"{self.path.parent}: another process has been opening or closing the store for {timeout_s:g} s; "
                    "look for one that is stopped or hangs"
                )
            time.sleep(_POLL_S)

    def leave_door(self) -> None:
        """Let others open and close."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _DOOR)

    def alone(self) -> bool:
        """Take the seat for this process only; False when another process sits."""
        return self._writable and self._try_lock(_SEAT, exclusive=True)

    def share(self) -> None:
        """Sit down among others; call it inside the door, where nobody can hold the seat alone."""
        fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, _SEAT)

    def stand_up(self) -> None:
        """Give the seat back."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _SEAT)

    def _try_lock(self, at: int, *, exclusive: bool) -> bool:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.lockf(self._fd, kind | fcntl.LOCK_NB, 1, at)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX allows
            return False
        return True

    def read(self) -> State | None:
        """Return what the file says; None when it is empty or unreadable."""
        try:
            found = json.loads(os.pread(self._fd, _MAX_BYTES, 0))
            if found.pop("version") != _VERSION:
                return None
            return State(**found)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None

    def write(self, state: State) -> None:
        """Replace the text and bring it to the medium; a torn write reads as None later."""
        text = json.dumps({"version": _VERSION, **asdict(state)}).encode()
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))
        os.fsync(self._fd)
