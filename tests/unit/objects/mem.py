"""A medium in memory that counts, delays and fails on request, and a backend on it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvstore.backend import BackendContext, Capability, PutHint, PutItem
from kvstore.errors import BackendError, BackendUnavailableError
from kvstore.objects.backend import ObjectBackend
from kvstore.objects.medium import ObjectBody, ObjectInfo, ObjectMedium
from kvstore.objects.settings import ObjectSettings
from kvstore.types import Call, PutStatus, ReadStatus, Run

Fault = Callable[[str, str], BackendError | None]
"""``fault(operation, key)``: the error to raise, or None."""


@dataclass
class Stored:
    data: bytes
    modified: float
    blocks: int


class MemBody(ObjectBody):
    def __init__(self, data: bytes, medium: MemMedium, key: str) -> None:
        self.nbytes = len(data)
        self._data = memoryview(data)
        self._medium = medium
        self._key = key
        self._at = 0
        self.closed = False

    def read_into(self, view: memoryview) -> None:
        assert not self.closed
        self._medium.strike("body", self._key)
        part = self._data[self._at : self._at + view.nbytes]
        if part.nbytes != view.nbytes:
            raise BackendUnavailableError(f"{self._key}: the body ended early")
        view.cast("B")[:] = part
        self._at += view.nbytes
        self._medium.moved_bytes += view.nbytes

    def close(self) -> None:
        self.closed = True


@dataclass
class MemMedium(ObjectMedium):
    """Objects in a dict; several media may share it, as processes share a bucket."""

    objects: dict[str, Stored] = field(default_factory=dict)
    latency_s: float = 0.0
    tells_blocks: bool = True
    honours_once: bool = True
    fault: Fault | None = None
    clock: Callable[[], float] = time.time
    count: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    moved_bytes: int = 0
    bodies: list[MemBody] = field(default_factory=list)
    closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strike(self, operation: str, key: str) -> None:
        error = None if self.fault is None else self.fault(operation, key)
        if error is not None:
            raise error

    def _enter(self, operation: str, key: str) -> None:
        with self._lock:
            self.count[operation] += 1
            self.asked.append((operation, key))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.latency_s:
                time.sleep(self.latency_s)
            self.strike(operation, key)
        finally:
            with self._lock:
                self.at_once -= 1

    def read(self, key: str, call: Call, *, start: int = 0, stop: int | None = None) -> ObjectBody | None:
        self._enter("read", key)
        stored = self.objects.get(key)
        if stored is None:
            self.count["read absent"] += 1
            return None
        body = MemBody(stored.data[start:stop], self, key)
        self.bodies.append(body)
        return body

    def write(self, key: str, buffers: Sequence[memoryview | bytes], call: Call, *, once: bool, blocks: int) -> bool:
        self._enter("write", key)
        data = b"".join(buffers)
        with self._lock:
            if once and self.honours_once and key in self.objects:
                return False
            self.objects[key] = Stored(data, self.clock(), blocks)
        return True

    def head(self, key: str, call: Call) -> ObjectInfo | None:
        self._enter("head", key)
        stored = self.objects.get(key)
        if stored is None:
            return None
        return ObjectInfo(key, len(stored.data), stored.modified, stored.blocks if self.tells_blocks else 0)

    def remove(self, keys: Sequence[str], call: Call) -> None:
        self._enter("remove", keys[0])
        for key in keys:
            self.objects.pop(key, None)

    def refresh(self, key: str, call: Call) -> None:
        self._enter("refresh", key)
        if key in self.objects:
            self.objects[key] = replace(self.objects[key], modified=self.clock())

    def entries(self, prefix: str, call: Call) -> Iterator[ObjectInfo]:
        self._enter("entries", prefix)
        for key, stored in list(self.objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(stored.data), stored.modified, stored.blocks if self.tells_blocks else 0)

    def close(self) -> None:
        self.closed = True

    def records(self) -> dict[str, Stored]:
        """The objects that hold records."""
        return {k: v for k, v in self.objects.items() if not k.startswith(("epochs/", "namespaces/", "drops/"))}


class MemBackend(ObjectBackend):
    """The smallest backend on the engine."""

    capabilities: ClassVar[Capability] = ObjectBackend.capabilities

    def __init__(self, medium: MemMedium | None = None, **settings: object) -> None:
        super().__init__()
        self.medium = medium or MemMedium()
        self._chosen = settings

    def connect(self, context: BackendContext) -> ObjectMedium:
        return self.medium

    def settings(self, context: BackendContext) -> ObjectSettings:
        return ObjectSettings(**self._chosen)  # type: ignore[arg-type]


PREFIX = hashlib.sha256(b"namespace").digest()[:16] + b"\x01"


def digest(*parts: object) -> bytes:
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()


def chain(seed: object, n: int) -> list[bytes]:
    """Names of ``n`` blocks whose digests are chained."""
    names: list[bytes] = []
    last = digest("root")
    for k in range(n):
        last = hashlib.sha256(last + digest(seed, k)).digest()
        names.append(PREFIX + last)
    return names


def content(name: bytes, nbytes: int = 300) -> bytes:
    """Bytes that only this name has."""
    return hashlib.shake_256(name).digest(nbytes)


def items_of(names: Sequence[bytes], start: int, stop: int, nbytes: int = 300) -> list[PutItem]:
    """Put items of the blocks ``[start, stop)`` of a chain that begins at position 0, tail first."""
    items = []
    for k in range(start, stop):
        data = content(names[k], nbytes)
        hint = PutHint(parent=names[k - 1] if k else b"", position=k)
        items.append(PutItem(names[k], [data[:100], memoryview(data)[100:]], hint))
    return items[::-1]


def put(backend: ObjectBackend, items: Sequence[PutItem]) -> list[PutStatus]:
    return backend.put_many(items, Call.within(30.0))


def call_for(names: Sequence[bytes], start: int = 0, *, leading_only: bool = False) -> Call:
    call = Call.within(30.0, leading_only=leading_only)
    call.run = Run(start, names)
    return call


def read(backend: ObjectBackend, names: Sequence[bytes], call: Call | None = None) -> list[bytes | None]:
    """Records by name, None for what was not delivered; checks that statuses tell the same."""
    buffers: dict[int, bytearray] = {}
    full: dict[int, bytes] = {}

    def place(i: int, info: object) -> list[memoryview]:
        assert i not in buffers
        buffers[i] = bytearray(info.nbytes)  # type: ignore[attr-defined]
        return [memoryview(buffers[i])]

    def done(i: int) -> None:
        full[i] = bytes(buffers[i])

    statuses = backend.read_many(names, place, done, call or Call.within(30.0))
    assert [s is ReadStatus.OK for s in statuses] == [i in full for i in range(len(names))]
    return [full.get(i) for i in range(len(names))]
