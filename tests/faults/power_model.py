"""Media as a power cut leaves them, made from what a process did to its files.

What was synced is there.  Everything else may be: each page of 4 KiB that was written since, each length, each name.
A sync of a file is about its bytes and its length, a sync of a directory about the names in it, as POSIX has it; the
file systems in use promise more.  Names of one directory change in the order in which they were changed.
"""

from __future__ import annotations

import enum
import json
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

PAGE_BYTES: Final = 4096
OTHER_BOOT: Final = "another boot"
_EVENT: Final = struct.Struct("<IIIIQqq")


class Kind(enum.IntEnum):
    """What happened; the numbers are those of ``power_recorder.c``."""

    WRITE = 1
    SYNC = 2
    SIZE = 3
    ROOM = 4
    CREATE = 5
    LINK = 6
    UNLINK = 7
    RENAME = 8
    MKDIR = 9
    TIME = 10
    MARK = 11


class Event(NamedTuple):
    kind: Kind
    inode: int
    a: int
    b: int
    text: str
    data: bytes


def events_of(log: Path) -> Iterator[Event]:
    """Read a log; one that ends in the middle of an event fails."""
    data = memoryview(log.read_bytes())
    while data:
        kind, path_bytes, data_bytes, _, inode, a, b = _EVENT.unpack_from(data)
        data = data[_EVENT.size :]
        assert len(data) >= path_bytes + data_bytes, "the log ends too early"
        text = bytes(data[:path_bytes]).decode()
        yield Event(Kind(kind), inode, a, b, text, bytes(data[path_bytes : path_bytes + data_bytes]))
        data = data[path_bytes + data_bytes :]


class Loss(enum.Enum):
    """What becomes of that which was not synced."""

    KEPT = "all of it is there"
    DROPPED = "nothing of it is there"
    ZEROED = "names and lengths are there, the bytes are not"
    TORN = "any pages, any lengths, names up to some point"
    CUT = "everything up to some point, of the last write some pages"


@dataclass
class _Write:
    at: int
    data: bytes


@dataclass
class _Size:
    nbytes: int
    shrinks: bool


class File:
    """Bytes on the medium, and what was done since they were synced."""

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.synced = bytearray()
        self.pending: list[_Write | _Size] = []
        self.time: tuple[int, int] | None = None

    def write(self, at: int, data: bytes) -> None:
        self.pending.append(_Write(at, data))

    def resize(self, nbytes: int, *, shrinks: bool) -> None:
        self.pending.append(_Size(nbytes, shrinks))

    def sync(self) -> None:
        self.synced = self.after(Loss.KEPT, random.Random())
        self.pending.clear()

    def after(self, loss: Loss, rng: random.Random) -> bytearray:
        """The file's bytes once the power is back."""
        data = bytearray(self.synced)
        if loss is Loss.DROPPED:
            return data
        if loss is Loss.TORN:
            return self._torn(data, rng)
        steps = self.pending[: rng.randint(0, len(self.pending))] if loss is Loss.CUT else self.pending
        for n, step in enumerate(steps):
            if isinstance(step, _Size):
                _resize(data, step)
                continue
            _reach(data, step.at + len(step.data))
            partly = loss is Loss.CUT and n == len(steps) - 1
            if partly:
                for at, page in _pages(step):
                    if rng.random() < 0.5:
                        data[at : at + len(page)] = page
            elif loss is not Loss.ZEROED:
                data[step.at : step.at + len(step.data)] = step.data
        return data

    def _torn(self, data: bytearray, rng: random.Random) -> bytearray:
        """Of the versions that each page had, any one; only what makes a file shorter keeps its place."""
        versions: dict[int, list[tuple[int, bytes]]] = {}
        for step in self.pending:
            if isinstance(step, _Write):
                for at, page in _pages(step):
                    versions.setdefault(at // PAGE_BYTES, []).append((at, page))
            elif step.shrinks and rng.random() < 0.5:
                _resize(data, step)
                versions = {}
            elif rng.random() < 0.5:
                _resize(data, step)
        for pages in versions.values():
            for at, page in pages[: rng.randint(0, len(pages))]:
                _reach(data, at + len(page))
                data[at : at + len(page)] = page
        return data


def _reach(data: bytearray, nbytes: int) -> None:
    if len(data) < nbytes:
        data.extend(bytes(nbytes - len(data)))


def _resize(data: bytearray, step: _Size) -> None:
    if step.shrinks:
        del data[step.nbytes :]
    _reach(data, step.nbytes)


def _pages(write: _Write) -> Iterator[tuple[int, bytes]]:
    """The parts of a write that lie on one page of the medium each."""
    at, data = write.at, write.data
    while data:
        n = PAGE_BYTES - at % PAGE_BYTES
        yield at, data[:n]
        at, data = at + n, data[n:]


@dataclass
class Folder:
    """Names on the medium, and how they were changed since they were synced; a change may touch two at once."""

    synced: dict[str, File | Folder] = field(default_factory=dict)
    now: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, names: dict[str, File | Folder | None]) -> None:
        self.pending.append(names)
        _apply(self.now, names)

    def sync(self) -> None:
        self.synced = dict(self.now)
        self.pending.clear()

    def after(self, loss: Loss, rng: random.Random) -> dict[str, File | Folder]:
        names = dict(self.synced)
        some = {Loss.DROPPED: 0, Loss.KEPT: len(self.pending), Loss.ZEROED: len(self.pending)}
        for change in self.pending[: some.get(loss, rng.randint(0, len(self.pending)))]:
            _apply(names, change)
        return names


def _apply(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Medium:
    """Everything below one directory, as recorded."""

    def __init__(self, root: Path) -> None:
        self._root = PurePosixPath(root)
        self.folder = Folder()
        self._nodes: dict[int, File | Folder] = {}

    def take(self, event: Event) -> None:
        """Do what a process did."""
        node = self._nodes.get(event.inode)
        match event.kind:
            case Kind.CREATE | Kind.MKDIR:
                self._make(event)
            case Kind.LINK | Kind.RENAME | Kind.UNLINK:
                self._name(event, node)
            case Kind.SYNC if node is not None:
                node.sync()
            case Kind.MARK:
                pass
            case _ if isinstance(node, File):
                self._change(event, node)

    def _make(self, event: Event) -> None:
        made = File(event.inode) if event.kind is Kind.CREATE else Folder()
        if PurePosixPath(event.text) == self._root:
            made = self.folder  # the directory itself lies on a medium that is there
        self._nodes[event.inode] = made
        if made is not self.folder:
            folder, name = self._place(event.text)
            folder.change({name: made})

    def _name(self, event: Event, node: File | Folder | None) -> None:
        folder, name = self._place(event.text)
        if event.kind is Kind.UNLINK:
            folder.change({name: None})
        elif node is not None:
            olds = [old for old, there in folder.now.items() if there is node and old != name]
            moved = event.kind is Kind.RENAME  # one change: both names, or none
            folder.change({**(dict.fromkeys(olds) if moved else {}), name: node})

    def _change(self, event: Event, file: File) -> None:
        if event.kind is Kind.WRITE:
            file.write(event.a, event.data)
        elif event.kind is Kind.SIZE:
            file.resize(event.a, shrinks=True)
        elif event.kind is Kind.ROOM:
            file.resize(event.a + event.b, shrinks=False)
        elif event.kind is Kind.TIME:
            file.time = (event.a, event.b)

    def _place(self, path: str) -> tuple[Folder, str]:
        *parts, name = PurePosixPath(path).relative_to(self._root).parts
        folder = self.folder
        for part in parts:
            inner = folder.now[part]
            assert isinstance(inner, Folder), path
            folder = inner
        return folder, name

    def leave(self, to: Path, loss: Loss, rng: random.Random) -> None:
        """Make the directory as it is after a power cut now."""
        inodes: dict[int, int] = {}
        _leave(self.folder, to, loss, rng, inodes)
        for state in to.rglob("kvstore.state"):
            _as_after_a_boot(state, inodes)


def _leave(folder: Folder, to: Path, loss: Loss, rng: random.Random, inodes: dict[int, int]) -> None:
    to.mkdir(mode=0o700)
    for name, node in folder.after(loss, rng).items():
        if isinstance(node, Folder):
            _leave(node, to / name, loss, rng, inodes)
            continue
        data = node.after(loss, rng)
        path = to / name
        with path.open("xb") as f:
            path.chmod(0o600)
            for at in range(0, len(data), 16 * PAGE_BYTES):  # holes stay holes
                part = data[at : at + 16 * PAGE_BYTES]
                if part.count(0) < len(part):
                    f.seek(at)
                    f.write(part)
            f.truncate(len(data))
        if node.time is not None and loss is not Loss.DROPPED:
            os.utime(path, ns=(0, node.time[0] * 1_000_000_000 + node.time[1]))
        inodes[node.inode] = path.stat().st_ino


def _as_after_a_boot(state: Path, inodes: dict[int, int]) -> None:
    """Inodes survive a power cut and boots do not, so the copies need the numbers of the copies."""
    try:
        said = json.loads(state.read_bytes())
        said["boot"] = OTHER_BOOT if said["boot"] else ""
        said["inode"] = inodes.get(said["inode"], said["inode"])
    except (ValueError, TypeError, KeyError):
        return  # torn: it says nothing
    state.write_text(json.dumps(said))
