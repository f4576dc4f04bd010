"""Going through all files of a tree, cleaning up on the way."""

# A walk over 100,000 files; Path objects would cost more than the system calls.
# ruff: noqa: PTH106, PTH108

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Container, Iterator

from kvstore.errors import BackendTimeoutError
from kvstore.objects.medium import ObjectInfo
from kvstore.types import Call
from kvstore_nvme.tree_errors import GONE, translate
from kvstore_nvme.tree_temporaries import is_stale, is_temporary

Count = Callable[[str, int], int]
"""``count(key, nbytes)``: records in a file, 0 when that is not cheap to know."""


class Walk:
    """One pass over a tree or a part of it.

    Args:
        root: The tree's directory.
        count: Tells the records in a file.
        call: Limits.
        skip: Names of temporaries that are not leftovers.
        cleans: Remove stale temporaries and empty directories.
    """

    def __init__(self, root: str, count: Count, call: Call, *, skip: Container[str], cleans: bool) -> None:
        self._root = root
        self._count = count
        self._call = call
        self._skip = skip
        self._cleans = cleans
        self.directories = 0
        self.leftover_bytes = 0

    def files(self, directory: str, start: str = "") -> Iterator[ObjectInfo]:
        """Files below a directory, given relative to the root, whose names begin with ``start``."""
        if self._call.stop():
            msg = f"{self._root}: the deadline passed while files were listed"
            raise BackendTimeoutError(msg)
        below = f"{directory}/" if directory else ""
        path = f"{self._root}/{directory}"
        inside: list[str] = []
        empty = True
        try:
            with os.scandir(path) as listed:
                for entry in listed:
                    empty = False
                    if entry.is_dir(follow_symlinks=False):
                        inside.append(entry.name)
                    elif (info := self._file(entry, below)) is not None and entry.name.startswith(start):
                        yield info
        except OSError as e:
            if e.errno in GONE:
                return
            raise translate(e, f"listing {path}") from e
        for name in inside:
            self.directories += 1
            if name.startswith(start):
                yield from self.files(below + name)
        if empty and directory.count("/") == 1:
            self._prune(path)

    def _prune(self, path: str) -> None:
        """Remove the directory of a namespace that holds nothing any more."""
        if self._cleans:
            with contextlib.suppress(OSError):  # somebody writes there again
                os.rmdir(path)

    def _file(self, entry: os.DirEntry[str], directory: str) -> ObjectInfo | None:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError as e:
            if e.errno in GONE:
                return None
            raise
        if not stat.S_ISREG(found.st_mode):
            return None
        if entry.name.startswith("."):
            self._leftover(entry, found)
            return None
        key = directory + entry.name
        return ObjectInfo(key, found.st_size, found.st_mtime, self._count(key, found.st_size))

    def _leftover(self, entry: os.DirEntry[str], found: os.stat_result) -> None:
        if entry.name in self._skip or not is_temporary(entry.name):
            return  # our own, or somebody else's
        if self._cleans and is_stale(entry.name, found.st_mtime):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
            return
        self.leftover_bytes += found.st_size
