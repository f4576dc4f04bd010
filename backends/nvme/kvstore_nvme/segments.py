"""The segment files: opening, preallocating, vectored reads and writes at any alignment."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore_lmdb.directory import sync_directory

from kvstore.errors import BackendPermissionError
from kvstore_nvme.geometry import Geometry
from kvstore_nvme.slot import PAGE_BYTES

SEGMENT: Final = re.compile(r"seg-(\d{4,})\Z")
_MAX_VECTORS: Final = 1024  # IOV_MAX on Linux
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_DONTCACHE: Final = 0x80  # RWF_DONTCACHE of Linux 6.14, not yet in the os module


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"seg-{number:04d}"


def segment_files(directory: Path) -> dict[int, Path]:
    """List the segment files by number.

    Raises:
        BackendPermissionError: One is not a regular file; links are never followed.
    """
    found = {int(m[1]): path for path in directory.iterdir() if (m := SEGMENT.match(path.name))}
    for path in found.values():
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BackendPermissionError(f"{path} is not a regular file; remove it or name another directory")
    return found


class Segments:
    """Reads and writes regions; thread-safe.

    Args:
        directory: Where the files lie.
        geometry: Their division into regions.
        direct: Bypass the page cache.
        uncached: Drop pages behind buffered I/O where the kernel can.
        writable: Open for writing.
    """

    def __init__(self, directory: Path, geometry: Geometry, *, direct: bool, uncached: bool, writable: bool) -> None:
        self.directory: Final = directory
        self.geometry: Final = geometry
        self.direct = direct
        self._flags = _DONTCACHE if uncached else 0
        self._writable: Final = writable
        self._lock: Final = threading.Lock()
        self._files: dict[tuple[int, bool], int] = {}
        self._retired: list[int] = []
        self._named: set[int] = set()  # segments whose names were brought to the medium

    @property
    def align(self) -> int:
        """What offsets, lengths and addresses must be multiples of."""
        return PAGE_BYTES if self.direct else 1

    @property
    def mode(self) -> str:
        """How the files are accessed, for people."""
        if self.direct:
            return "direct"
        return "buffered, pages dropped behind" if self._flags else "buffered"

    def read(self, region: int, offset: int, vectors: Sequence[memoryview]) -> int:
        """Fill ``vectors`` from a region; returns the bytes read, fewer only at the end of the file.

        Raises:
            OSError: The file is missing or cannot be read.
        """
        return self._transfer(region, offset, vectors, write=False)

    def write(self, region: int, offset: int, vectors: Sequence[memoryview]) -> None:
        """Write ``vectors`` to a region.

        Raises:
            OSError: Not everything could be written.
        """
        if self._transfer(region, offset, vectors, write=True) < sum(v.nbytes for v in vectors):
            raise OSError(errno.EIO, "the system wrote less than it was given")

    def allocate(self, region: int) -> None:
        """Give a region its disk space.

        Raises:
            OSError: There is no room; the file is as long as before.
        """
        number, start = self.geometry.place(region)
        fd = self._descriptor(number, direct=False, create=True)
        before = os.fstat(fd).st_size
        try:
            os.posix_fallocate(fd, start, self.geometry.region_bytes)
        except OSError as e:
            if e.errno in {errno.EOPNOTSUPP, errno.ENOSYS}:  # then a lack of room shows when it is written
                os.ftruncate(fd, max(before, start + self.geometry.region_bytes))
                return
            os.ftruncate(fd, before)  # some file systems keep what they found before the end
            raise

    def lengths(self) -> dict[int, int]:
        """Return the length of each segment file."""
        found: dict[int, int] = {}
        for path in self.directory.iterdir():
            match = SEGMENT.match(path.name)
            if match:
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    found[int(match[1])] = status.st_size if stat.S_ISREG(status.st_mode) else 0
        return found

    def allocated(self, region: int) -> bool:
        """Whether the file reaches to the end of a region."""
        number, _ = self.geometry.place(region)
        try:
            found = (self.directory / segment_name(number)).lstat()
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and self.geometry.within(region, {number: found.st_size})

    def cut(self, regions: int) -> None:
        """Shorten the files to the first ``regions`` regions; removes files that are not needed."""
        for number, path in segment_files(self.directory).items():
            keep = max(0, regions - number * self.geometry.segment_regions) * self.geometry.region_bytes
            if not keep:
                os.truncate(self._descriptor(number, direct=False), 0)  # others may have it open
                self._forget(number)
                path.unlink(missing_ok=True)
            elif keep < path.lstat().st_size:
                os.truncate(self._descriptor(number, direct=False), keep)

    def sync(self, region: int) -> None:
        """Bring a region's file to the medium."""
        number = self.geometry.place(region)[0]
        os.fdatasync(self._descriptor(number, direct=self.direct))
        if number not in self._named:
            sync_directory(self.directory)  # else a power cut may leave a new file without its name
            self._named.add(number)

    def forget_replaced(self) -> None:
        """Close descriptors whose file is not the one under its name any more."""
        for number, direct in list(self._files):
            fd = self._files.get((number, direct))
            try:
                found = (self.directory / segment_name(number)).lstat()
                mine = os.fstat(fd) if fd is not None else found
            except OSError:
                self._forget(number)
                continue
            if (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino):
                self._forget(number)

    def close(self) -> None:
        """Close all files; the caller has made sure that nobody uses them."""
        with self._lock:
            for fd in [*self._files.values(), *self._retired]:
                os.close(fd)
            self._files.clear()
            self._retired.clear()

    def _forget(self, number: int) -> None:
        """Use a segment's files no more; a transfer may be running, so they are closed with the store."""
        with self._lock:
            for key in [k for k in self._files if k[0] == number]:
                self._retired.append(self._files.pop(key))
            self._named.discard(number)

    def _descriptor(self, number: int, *, direct: bool, create: bool = False) -> int:
        fd = self._files.get((number, direct))
        if fd is not None:
            return fd
        with self._lock:
            fd = self._files.get((number, direct))
            if fd is None:
                flags = os.O_RDWR if self._writable else os.O_RDONLY
                flags |= os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0) | (os.O_CREAT if create else 0)
                fd = os.open(self.directory / segment_name(number), flags, 0o600)
                if create:
                    os.fchmod(fd, 0o600)  # whatever the umask says
                self._files[number, direct] = fd
            return fd

    def _transfer(self, region: int, offset: int, vectors: Sequence[memoryview], *, write: bool) -> int:
        number, start = self.geometry.place(region)
        at, done, total = start + offset, 0, sum(v.nbytes for v in vectors)
        rest = list(vectors)
        direct = self.direct
        while done < total:
            moved = self._once(number, rest[:_MAX_VECTORS], at + done, write=write, direct=direct)
            if moved < 0:
                direct = False
                continue
            if not moved:
                break
            done += moved
            if done < total:
                rest = _after(rest, moved)
                # A short transfer may end anywhere: the page cache takes the rest at any alignment.
                direct = direct and not moved % PAGE_BYTES
        return done

    def _once(self, number: int, vectors: Sequence[memoryview], at: int, *, write: bool, direct: bool) -> int:
        """Move some bytes; -1 when the file system refuses the way it was tried."""
        flags = 0 if direct else self._flags
        try:
            fd = self._descriptor(number, direct=direct)
            return os.pwritev(fd, vectors, at, flags) if write else os.preadv(fd, vectors, at, flags)
        except OSError as e:
            if e.errno not in _REFUSED or not (direct or flags):
                raise
            if direct:
                self.direct = False
            else:
                self._flags = 0
            return -1


def _after(vectors: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return what follows the first ``nbytes`` of a vector list."""
    rest = []
    for view in vectors:
        if nbytes >= view.nbytes:
            nbytes -= view.nbytes
        else:
            rest.append(view[nbytes:])
            nbytes = 0
    return rest
