"""Backends that misbehave on purpose, registered in-process through the plugin door."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from kvstore.backend import Backend, Capability, Place, PutItem, Receive, RecordInfo
from kvstore.hookspecs import hookimpl
from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import BackendPlugin, Registry
from kvstore.types import READ_PRIORITY, Call, Presence, PutStatus, ReadStatus, Run


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The doubles take none."""


class PooledBackend(MemoryBackend):
    """Memory that is read by the tier's own threads, records in any order."""

    capabilities: ClassVar[Capability] = MemoryBackend.capabilities & ~Capability.CALLER_READS

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        if call.leading_only:
            return super().get_many(names, receive, call)
        backwards = super().get_many(names[::-1], lambda i, view: receive(len(names) - 1 - i, view), call)
        return backwards[::-1]


class GatedBackend(PooledBackend):
    """Answers reads only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        self.reads += 1
        self.gate.wait(30)
        patient = Call.within(30, leading_only=call.leading_only)  # a medium that ignores the deadline
        return super().get_many(names, receive, patient)


class GatedWrites(MemoryBackend):
    """Stores only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        self.writing.set()
        self.gate.wait(30)
        return super().put_many(items, Call.within(30, priority=call.priority))


class CountingBackend(MemoryBackend):
    """Memory that counts what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.put_names: list[bytes] = []
        self.put_shapes: list[tuple[int, int]] = []  # buffers of each item, and its head_bytes
        self.touched: list[list[bytes]] = []

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        self.put_names += [item.name for item in items]
        self.put_shapes += [(len(item.buffers), item.head_bytes) for item in items]
        return super().put_many(items, call)

    def touch_many(self, names: Sequence[bytes]) -> None:
        self.touched.append(list(names))
        super().touch_many(names)


class RaisingBackend(MemoryBackend):
    """Raises something that no contract allows from every data method."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        raise RuntimeError("get_many is broken")

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        raise RuntimeError("put_many is broken")

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        raise RuntimeError("exists_many is broken")

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        raise RuntimeError("delete_many is broken")


class NoneBackend(MemoryBackend):
    """Answers None to everything."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> Any:
        return None

    def put_many(self, items: Sequence[PutItem], call: Call) -> Any:
        return None

    def exists_many(self, names: Sequence[bytes], call: Call) -> Any:
        return None


class ShortBackend(MemoryBackend):
    """Answers one status too few."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        return super().get_many(names, receive, call)[1:]

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        return super().put_many(items, call)[1:]

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        return super().exists_many(names, call)[1:]


class LyingBackend(MemoryBackend):
    """Says OK for records that it never delivers."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        return [ReadStatus.OK] * len(names)

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        return [Presence.PRESENT] * len(names)


class PlacingBackend(MemoryBackend):
    """Reads records straight into the memory that the core names.

    Attributes:
        knows_heads: Whether it can tell a record's head from its payload, and the codec.
        infos: What ``place`` was told, and the address of the place it gave; 0 for None.
        reads: Names of each call, with the call.
    """

    capabilities: ClassVar[Capability] = PooledBackend.capabilities | Capability.READ_INTO
    knows_heads = True

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[tuple[RecordInfo, int]] = []
        self.reads: list[tuple[list[bytes], Call]] = []
        self.heads: dict[bytes, tuple[int, int]] = {}  # head_bytes and codec of each record

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        for item in items:
            head = b"".join(item.buffers)[: item.head_bytes or len(item.buffers[0])]
            self.heads[item.name] = (len(head), int.from_bytes(head[12:14], "little"))
        return super().put_many(items, call)

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        return Backend.get_many(self, names, receive, call)

    def info(self, name: bytes, data: bytes) -> RecordInfo:
        """What the medium says about a record."""
        if not self.knows_heads:
            return RecordInfo(name, 0, len(data))
        head, codec = self.heads.get(name, (0, -1))
        return RecordInfo(name, head, len(data) - head, codec)

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        self.reads.append((list(names), call))
        return [self.read_one(i, name, place, done) for i, name in enumerate(names)]

    def read_one(self, i: int, name: bytes, place: Place, done: Callable[[int], None]) -> ReadStatus:
        """Read one record into its place."""
        found = self._records.get(name)
        if found is None:
            return ReadStatus.ABSENT
        info = self.info(name, found[0])
        places = place(i, info)
        address = 0 if places is None else np.frombuffer(places[0], np.uint8).ctypes.data
        self.infos.append((info, address))
        if places is None:
            return ReadStatus.OK
        assert sum(p.nbytes for p in places) == info.nbytes
        places[0][:] = found[0]
        done(i)
        return ReadStatus.OK


class ParallelBackend(PlacingBackend):
    """Reads the records of one call in four threads, all of them at the same time where there are four."""

    capabilities: ClassVar[Capability] = PlacingBackend.capabilities | Capability.PARALLEL
    THREADS = 4

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        self.reads.append((list(names), call))
        statuses = [ReadStatus.SKIPPED] * len(names)
        threads = min(self.THREADS, len(names))
        together = threading.Barrier(threads)

        def work(k: int) -> None:
            for i in range(k, len(names), threads):
                if i < threads:
                    together.wait(10)
                statuses[i] = self.read_one(i, names[i], place, done)

        workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return statuses


class PackingBackend(PooledBackend):
    """Claims to keep runs of blocks as one object, and notes what it is asked.

    Attributes:
        calls: Method, names asked for, and the run that came along.
    """

    capabilities: ClassVar[Capability] = PooledBackend.capabilities | Capability.PACKS | Capability.PARALLEL

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[bytes], Run | None]] = []

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        self.calls.append(("get_many", list(names), call.run))
        return super().get_many(names, receive, call)

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        if call.priority == READ_PRIORITY:
            self.calls.append(("exists_many", list(names), call.run))
        return super().exists_many(names, call)

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        self.calls.append(("delete_many", list(names), call.run))
        return super().delete_many(names, call)


_numbers = itertools.count()


def register(factory: Callable[[], Backend], registry: Registry | None = None) -> tuple[Registry, str]:
    """A registry in which a name stands for ``factory``; returns both."""
    registry = registry or Registry.discover()
    name = f"double-{next(_numbers)}"
    module = ModuleType(f"hooks_of_{name.replace('-', '_')}")

    @hookimpl
    def kvstore_register_backends() -> list[BackendPlugin]:
        plugin = BackendPlugin(name=name, options=NoOptions, factory=factory, summary="a double", default_codec="none")
        return [plugin]

    module.kvstore_register_backends = kvstore_register_backends  # type: ignore[attr-defined]
    registry.register(module, name)
    return registry, name
