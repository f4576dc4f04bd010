"""``kvstore.regions``: byte locks that say which process opens, uses and appends where.

Byte *n* is held by whoever may change region *n*; far beyond lie the *door*, held while opening,
and the *seat*, shared by every process that has the store open.  POSIX locks die with their
process and are not inherited over a fork; they also vanish when the process closes any descriptor
of the file, so a process keeps exactly one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Final

from kvstore.errors import BackendPermissionError, BackendUnavailableError

LOCKS_NAME: Final = "kvstore.regions"
_DOOR: Final = 1 << 40
_SEAT: Final = (1 << 40) + 1
_POLL_S: Final = 0.005


class Locks:
    """The one descriptor this process keeps on a store's lock file."""

    def __init__(self, directory: Path) -> None:
        """Open or create the file.

        Raises:
            BackendPermissionError: It is a symbolic link.
            OSError: It cannot be opened.
        """
        self.path: Final = directory / LOCKS_NAME
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            if e.errno == errno.ELOOP:
                raise BackendPermissionError(f"{self.path} is a symbolic link; remove it") from e
            raise
        os.fchmod(self._fd, 0o600)  # whatever the umask says

    def close(self) -> None:
        """Close the descriptor; every lock of this process on the file ends."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def enter_door(self, timeout_s: float) -> None:
        """Wait to be the only process that opens the store.

        Raises:
            BackendUnavailableError: Another process stayed in the door for ``timeout_s``.
        """
        end = time.monotonic() + timeout_s
        while not self._try_lock(_DOOR):
            if time.monotonic() > end:
                raise BackendUnavailableError(
                    f"{self.path.parent}: another process has been opening the store for {timeout_s:g} s; "
                    "look for one that is stopped or hangs"
                )
            time.sleep(_POLL_S)

    def leave_door(self) -> None:
        """Let others open."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _DOOR)

    def alone(self) -> bool:
        """Take the seat for this process only; False when another process has the store open."""
        return self._try_lock(_SEAT)

    def share(self) -> None:
        """Sit down among others; call it inside the door, where nobody can hold the seat alone."""
        fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, _SEAT)

    def take(self, region: int) -> bool:
        """Take a region for this process; False when another process holds it."""
        return self._try_lock(region)

    def give(self, region: int) -> None:
        """Give a region back."""
        if self._fd >= 0:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, region)

    def _try_lock(self, at: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX allows
            return False
        return True
