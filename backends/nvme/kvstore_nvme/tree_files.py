"""Whole files: written completely or not at all, read where they are."""

# File descriptors and strings: Path objects would cost as much as the system calls.
# ruff: noqa: PTH108

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.errors import BackendTimeoutError, BackendUnavailableError
from kvstore.objects.medium import ObjectBody
from kvstore.types import Call
from kvstore_nvme.tree_errors import GONE, translate

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a foreign FIFO must not block
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE_MODE: Final = 0o600
_IOV_BUFFERS: Final = 512  # half of Linux's IOV_MAX
_GATHER_BYTES: Final = 1 << 20  # a pack of 16 small blocks; larger ones gain nothing, and are delivered one by one
_CHUNK_BYTES: Final = 8 << 20  # the deadline is looked at between system calls of this size


class OpenFile(NamedTuple):
    """A regular file that was opened for reading; whoever has it closes ``fd``."""

    path: str
    fd: int
    nbytes: int
    modified: float


def open_file(path: str) -> OpenFile | None:
    """Open a regular file for reading; None when there is none.

    Raises:
        OSError: It is there and cannot be opened.
    """
    try:
        fd = os.open(path, _READ_FLAGS)
    except OSError as e:
        if e.errno in GONE:
            return None
        raise
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode):
            return OpenFile(path, fd, found.st_size, found.st_mtime)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


class FileBody(ObjectBody):
    """Bytes ``[start, stop)`` of an open file; the descriptor is closed with it."""

    gather_bytes = _GATHER_BYTES

    def __init__(self, file: OpenFile, start: int, stop: int | None, call: Call) -> None:
        end = file.nbytes if stop is None else min(stop, file.nbytes)
        self.nbytes = max(0, end - start)
        self.modified = file.modified
        self._fd = file.fd
        self._path = file.path
        self._at = start
        self._stop = start + self.nbytes
        self._call = call

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` from the file, which stays whole even when it is replaced or removed."""
        if view.nbytes > self._stop - self._at:
            msg = f"{self._path}: {view.nbytes} bytes wanted at {self._at}, the range ends at {self._stop}"
            raise BackendUnavailableError(msg)
        view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        while view.nbytes:
            view = view[self._read([view[:_CHUNK_BYTES]]) :]

    def read_into_all(self, views: Sequence[memoryview]) -> None:
        """Fill views with one system call, or a few."""
        nbytes = sum(view.nbytes for view in views)
        if len(views) <= _IOV_BUFFERS and 0 < nbytes <= min(_CHUNK_BYTES, self._stop - self._at):
            got = self._read(views)
            if got == nbytes:
                return
            self._at -= got  # interrupted: once more, view by view
        for view in views:
            self.read_into(view)

    def _read(self, views: Sequence[memoryview]) -> int:
        if self._call.stop():
            msg = f"{self._path}: the deadline passed at byte {self._at}"
            raise BackendTimeoutError(msg)
        try:
            got = os.preadv(self._fd, views, self._at)
        except OSError as e:
            raise translate(e, f"reading {self._path}") from e
        if not got:
            msg = f"{self._path} ends at byte {self._at}, {self._stop} were there when it was opened"
            raise BackendUnavailableError(msg)
        self._at += got
        return got

    def skip(self, nbytes: int) -> None:
        """Go on further behind; costs nothing."""
        self._at += nbytes

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # reading is over
                os.close(fd)


def write_file(path: str, buffers: Sequence[memoryview | bytes], *, sync: bool) -> None:
    """Create a file with these bytes; an unfinished one is removed.

    Raises:
        OSError: It exists, or could not be written as a whole.
    """
    fd = os.open(path, _WRITE_FLAGS, _FILE_MODE)
    try:
        try:
            _write_all(fd, buffers)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)  # may report what a network file system could not write
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _write_all(fd: int, buffers: Sequence[memoryview | bytes]) -> None:
    left = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
    while left:
        written = os.writev(fd, left[:_IOV_BUFFERS])
        done = 0
        while done < len(left) and written >= left[done].nbytes:
            written -= left[done].nbytes
            done += 1
        left = left[done:]
        if left and written:
            left[0] = left[0][written:]


def sync_directory(path: str) -> None:
    """Make names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
