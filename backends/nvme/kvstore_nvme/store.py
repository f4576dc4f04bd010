"""An open store that all backends of this process on one directory share."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb
from kvstore_lmdb.gate import Gate
from kvstore_lmdb.guard import GuardedEnvironment, close_guarded

from kvstore.errors import ClosedError
from kvstore_nvme.buffers import Staging
from kvstore_nvme.index import Index, Trees
from kvstore_nvme.locks import Locks
from kvstore_nvme.segments import Segments

_UNREADABLE_KEPT: Final = 4096

Removed = Callable[[Sequence[bytes]], None]


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of a store, as :func:`kvstore_nvme.opening.open_store` puts them together.

    Attributes:
        directory: Where the store lies.
        guarded: The index's environment.
        trees: Its trees.
        segments: The segment files.
        locks: The lock file; None in a store that is open for reading only.
        block_bytes: Raw bytes of a block, as far as known; 0 otherwise.
        anchor: Device and inode of the file that makes the directory a store.
    """

    directory: Path
    guarded: GuardedEnvironment
    trees: Trees
    segments: Segments
    locks: Locks | None
    block_bytes: int
    anchor: tuple[int, int]


class Store:
    """Files, index and locks of one directory; operations run between :meth:`entered`."""

    def __init__(self, opened: Opened) -> None:
        self.opened: Final = opened
        self.directory: Final = opened.directory
        self.env: Final = opened.guarded.env
        self.index: Final = Index(opened.trees)
        self.segments: Final = opened.segments
        self.locks: Final = opened.locks
        self.geometry: Final = opened.segments.geometry
        self.read_only: Final = opened.locks is None
        self.gate: Final = Gate()
        self.evicted = 0
        self._local: Final = threading.local()
        self._listeners: dict[int, Removed] = {}
        self._at_close: list[Callable[[], None]] = []
        self._unreadable: dict[int, None] = {}
        self._suspect = False
        self._retired = False
        self._void = False
        self._closing = False

    @property
    def usable(self) -> bool:
        """Whether operations may start: neither retired nor inherited over a fork."""
        return not (self._retired or self._void)

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """Run one operation; yields False when the store is retired.

        Raises:
            ClosedError: The process was forked since; the child must open its own.
        """
        if self._void:
            raise ClosedError("this NVMe backend was inherited over a fork; open a new one in the child process")
        if not self.gate.enter():
            yield False
            return
        try:
            yield True
        finally:
            self.gate.leave()

    def reading(self) -> Any:
        """Begin a read transaction; frees the slots of dead readers when none is left."""
        try:
            return self.env.begin()
        except lmdb.ReadersFullError:
            self.env.reader_check()
            return self.env.begin()

    def writing(self) -> Any:
        """Begin a write transaction; waits for the other writers of all processes."""
        return self.env.begin(write=True)

    def staging(self) -> Staging:
        """Return scratch memory of this thread, to be used in a ``with`` statement."""
        free: list[Staging] | None = getattr(self._local, "free", None)
        if free is None:
            free = self._local.free = []
        return free.pop() if free else Staging(free)

    def unreadable(self, sequence: int) -> bool:
        """Note that the device failed to read a record; whether it had failed at the same one before."""
        if sequence in self._unreadable:
            return True
        if len(self._unreadable) >= _UNREADABLE_KEPT:
            self._unreadable.clear()
        self._unreadable[sequence] = None
        return False

    def retire(self, *, suspect: bool) -> None:
        """Let no operation start any more; the users drop it and open anew."""
        self._suspect = self._suspect or suspect
        self._retired = True
        self.gate.shut()

    def replaced(self) -> bool:
        """Whether the path no longer leads to the files that are open."""
        guarded = self.opened.guarded
        pairs = ((guarded.data, guarded.identity), (self.directory / "kvstore.nvme", self.opened.anchor))
        for path, identity in pairs:
            try:
                found = path.lstat()
            except OSError:
                return True
            if (found.st_dev, found.st_ino) != identity:
                return True
        return False

    def listen(self, owner: int, removed: Removed) -> None:
        """Tell ``removed`` about evicted names until :meth:`forget`."""
        self._listeners = {**self._listeners, owner: removed}

    def forget(self, owner: int) -> None:
        """Stop telling a backend about evicted names."""
        self._listeners = {k: v for k, v in self._listeners.items() if k != owner}

    def report_removed(self, names: Sequence[bytes]) -> None:
        """Tell every backend of this process; call it after the commit."""
        self.evicted += len(names)
        for removed in self._listeners.values():
            removed(names)

    def at_close(self, work: Callable[[], None]) -> None:
        """Have ``work`` done when the last operation has ended, before the files are closed."""
        self._at_close.append(work)

    def close(self) -> None:
        """Wait for running operations and close; blocks."""
        self.gate.shut()
        self.gate.wait_empty(None)
        self._closing = True
        for work in self._at_close:
            work()
        close_guarded(self.opened.guarded, suspect=self._suspect)
        self.segments.close()
        if self.locks is not None:
            self.locks.close()

    def void(self) -> None:
        """Give up an inherited store in a forked child.

        With operations running at the fork, their transactions were copied too: liblmdb would
        give back the parent's reader slots if the object died, so it is kept alive for good.
        """
        self._void = True
        if self.gate.inside or self._closing:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.env))
            return
        self.env.close()  # unmaps and closes this process's descriptors; locks and slots stay the parent's
        if self.opened.guarded.state is not None:
            self.opened.guarded.state.close()
        self.segments.close()
        if self.locks is not None:
            self.locks.close()
