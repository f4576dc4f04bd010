"""A directory tree as a medium for whole objects, for mounts that several machines share.

Nothing but names is relied on: a file is written under a name of its own beside its place and then
linked or renamed there.  No index, no locks, no maps, so any number of machines may write, sweep
and crash; what one removes is a miss for the others.
"""

# Keys are safe text already; Path objects would cost as much as the system calls.
# ruff: noqa: PTH102, PTH105, PTH106, PTH108, PTH112, PTH116

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.backend import Durability
from kvstore.errors import BackendTimeoutError, BackendUnavailableError
from kvstore.objects.medium import ObjectBody, ObjectInfo, ObjectMedium
from kvstore.objects.naming import holds_records
from kvstore.objects.pack import HEADER, PackError, parse_header
from kvstore.types import Call
from kvstore_nvme.tree_errors import GONE, NO_LINKS, translate
from kvstore_nvme.tree_files import FileBody, OpenFile, open_file, sync_directory, write_file
from kvstore_nvme.tree_temporaries import new_name
from kvstore_nvme.tree_walk import Walk

_DIRECTORY_MODE: Final = 0o700
_DIRECTORY_BYTES: Final = 4096  # what a directory of up to some hundred names takes
_RACES: Final = 5  # times that a directory may be removed under a writer before it gives up
_FULL_S: Final = 60.0  # after a write that found no room, removals take empty directories along: inodes may be short
_COUNTED: Final = 50_000  # files whose number of records is remembered, about 150 bytes each


class TreeMedium(ObjectMedium):
    """Objects as files under one directory; thread-safe, shared by any number of machines."""

    def __init__(self, root: str, durability: Durability, *, read_only: bool) -> None:
        self.root: Final = root
        self._sync: Final = durability == "durable"
        self._read_only: Final = read_only
        self._lock = threading.Lock()
        self._blocks: dict[str, int] = {}
        self._directories = 0
        self._leftover_bytes = 0
        self._made = 0  # directories made since the last walk over everything began
        self._full_at = -math.inf
        self._inside = {root}  # directories that were seen to be no links
        self._unpublished: set[str] = set()  # names of own temporaries: their bytes are counted by who writes them

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _check_inside(self, path: str) -> None:
        """Refuse to go through a link, which may lead anywhere; each directory is looked at once.

        Raises:
            OSError: A directory of the path is a link (ELOOP), is missing, or cannot be looked at.
        """
        directory = path.rpartition("/")[0]
        if directory in self._inside:
            return
        self._check_inside(directory)
        if stat.S_ISLNK(os.stat(directory, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, "a link instead of a directory is not followed", directory)
        self._inside.add(directory)

    # -- reading

    def read(self, key: str, call: Call, *, start: int = 0, stop: int | None = None) -> ObjectBody | None:
        """Open a file; it stays readable when it is removed meanwhile."""
        path = self._path(key)
        try:
            opened = self._open(path)
        except OSError as e:
            raise translate(e, f"opening {path}") from e
        if opened is None:
            return None
        return FileBody(opened, start, stop, call)

    def _open(self, path: str) -> OpenFile | None:
        try:
            self._check_inside(path)
        except OSError as e:
            if e.errno in GONE:
                return None
            raise
        return open_file(path)

    def head(self, key: str, call: Call) -> ObjectInfo | None:
        """Look at a file, and into its first bytes for the number of records."""
        if call.stop():
            msg = f"{self._path(key)}: the deadline passed before it was looked at"
            raise BackendTimeoutError(msg)
        path = self._path(key)
        try:
            file = self._open(path)
            if file is None:
                return None
            try:
                start = os.pread(file.fd, HEADER.size, 0) if holds_records(key) else b""
            finally:
                os.close(file.fd)
        except OSError as e:
            raise translate(e, f"looking at {path}") from e
        return ObjectInfo(key, file.nbytes, file.modified, _records(start, file.nbytes))

    # -- writing

    def write(self, key: str, buffers: Sequence[memoryview | bytes], call: Call, *, once: bool, blocks: int) -> bool:
        """Write a file beside its place, then publish it there by a link or a rename."""
        if call.stop():
            msg = f"{self._path(key)}: the deadline passed before it was written"
            raise BackendTimeoutError(msg)
        path = self._path(key)
        directory = path.rpartition("/")[0]
        name = new_name()
        try:
            if once and _is_taken(path):
                return False
            self._unpublished.add(name)
            self._create(f"{directory}/{name}", directory, buffers)
            if not self._publish_or_remove(f"{directory}/{name}", path, once=once):
                return False
            if self._sync:
                sync_directory(directory)
        except OSError as e:
            if e.errno in {errno.ENOSPC, errno.EDQUOT}:
                self._full_at = time.monotonic()
            raise translate(e, f"writing {path}") from e
        finally:
            self._unpublished.discard(name)
        self._note(key, blocks)
        return True

    def _create(self, temporary: str, directory: str, buffers: Sequence[memoryview | bytes]) -> None:
        for _ in range(_RACES):
            try:
                self._check_inside(temporary)
                write_file(temporary, buffers, sync=self._sync)
            except FileNotFoundError:
                self._make_directory(directory)
            else:
                return
        msg = f"{directory} is removed as often as it is made; does something else clean up there?"
        raise BackendUnavailableError(msg)

    def _make_directory(self, path: str) -> None:
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            if path == self.root:
                break
            path = path.rpartition("/")[0]
        for directory in reversed(missing):
            try:
                os.mkdir(directory, _DIRECTORY_MODE)
            except FileExistsError:
                continue
            except FileNotFoundError:
                return  # a sweep removed its parent just now; the caller tries again
            with self._lock:
                self._directories += 1
                self._made += 1
            if self._sync:
                sync_directory(directory.rpartition("/")[0])

    def _publish_or_remove(self, temporary: str, path: str, *, once: bool) -> bool:
        published = False
        try:
            published = self._publish(temporary, path, once=once)
        finally:
            if not published:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        return published

    def _publish(self, temporary: str, path: str, *, once: bool) -> bool:
        if not once:
            os.replace(temporary, path)
            return True
        try:
            os.link(temporary, path)
        except OSError as e:
            if e.errno == errno.EEXIST and _same_file(temporary, path):
                os.unlink(temporary)  # linked, and a network file system lost the answer
                return True
            if e.errno not in {errno.EEXIST, *NO_LINKS}:
                raise
            if _is_taken(path):
                return False
            # an empty file, as a power cut leaves it, or no links here: then of two writers at the
            # same instant the later one's copy stays, which is as good
            os.replace(temporary, path)
        else:
            os.unlink(temporary)
        return True

    def remove(self, keys: Sequence[str], call: Call) -> None:
        """Unlink files; one that is gone already is no error."""
        for key in keys:
            if call.stop():
                msg = f"{self.root}: the deadline passed while files were removed"
                raise BackendTimeoutError(msg)
            path = self._path(key)
            try:
                self._check_inside(path)
                os.unlink(path)
            except OSError as e:
                if e.errno not in GONE:
                    raise translate(e, f"removing {path}") from e
            with self._lock:
                self._blocks.pop(key, None)
            if time.monotonic() - self._full_at < _FULL_S:
                self._remove_empty(path)

    def _remove_empty(self, path: str) -> None:
        """Remove the directories of a file that was removed, up to the first that still holds something."""
        with contextlib.suppress(OSError):
            while (path := path.rpartition("/")[0]) != self.root:
                os.rmdir(path)
                with self._lock:
                    self._directories -= 1

    def refresh(self, key: str, call: Call) -> None:
        """Set the file's time to now."""
        self.backdate(key, 0.0, call)

    def backdate(self, key: str, by_s: float, call: Call) -> None:
        """Set the file's time to so long ago, by this machine's clock."""
        del call
        path = self._path(key)
        at = time.time_ns() - int(by_s * 1e9)
        try:
            self._check_inside(path)
            os.utime(path, ns=(at, at), follow_symlinks=False)
        except OSError as e:
            if e.errno not in GONE:
                raise translate(e, f"setting the time of {path}") from e

    # -- listing

    def entries(self, prefix: str, call: Call) -> Iterator[ObjectInfo]:
        """Walk the tree; stale temporaries and empty directories found on the way are removed."""
        directory, _, start = prefix.rpartition("/")
        whole = not prefix
        try:
            self._check_inside(self._path(prefix))
        except OSError as e:
            if e.errno in GONE:
                return
            raise translate(e, f"listing {self._path(directory)}") from e
        if whole:
            with self._lock:
                self._made = 0
        walk = Walk(self.root, self._count_of, call, skip=self._unpublished, cleans=not self._read_only)
        yield from walk.files(directory, start)
        if whole:
            with self._lock:
                self._directories = walk.directories + self._made  # some of them twice, until the next walk
                self._leftover_bytes = walk.leftover_bytes

    def overhead_bytes(self) -> int:
        """Directories, and temporaries of others as of the last walk over everything."""
        return self._directories * _DIRECTORY_BYTES + self._leftover_bytes

    def _count_of(self, key: str, nbytes: int) -> int:
        """Records in a file that a walk found; 0 when it is not known and not cheap to know."""
        if not holds_records(key):
            return 0
        known = self._blocks.get(key)
        if known is None and len(self._blocks) < _COUNTED:
            known = 0
            with contextlib.suppress(OSError):
                if (file := open_file(self._path(key))) is not None:
                    try:
                        known = _records(os.pread(file.fd, HEADER.size, 0), nbytes)
                    finally:
                        os.close(file.fd)
            self._note(key, known)
        return known or 0

    def _note(self, key: str, blocks: int) -> None:
        if blocks:
            with self._lock:
                if key in self._blocks or len(self._blocks) < _COUNTED:
                    self._blocks[key] = blocks

    def describe(self) -> dict[str, str]:
        """Facts for ``stat`` and ``doctor``."""
        return {
            "path": self.root,
            "layout": "tree",
            "durability": "durable" if self._sync else "cache",
            "access": "read-only" if self._read_only else "read-write",
        }


def _records(start: bytes, nbytes: int) -> int:
    try:
        return parse_header(start, nbytes).records
    except PackError:
        return 0


def _is_taken(path: str) -> bool:
    """Whether there is a file that is not empty."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError as e:
        if e.errno in GONE:
            return False
        raise
    return found.st_size > 0 and stat.S_ISREG(found.st_mode)


def _same_file(a: str, b: str) -> bool:
    try:
        return os.path.samestat(os.stat(a, follow_symlinks=False), os.stat(b, follow_symlinks=False))
    except OSError:
        return False
