"""Backends that misbehave on purpose, registered in-process through the plugin door."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from kvstore.backend import Backend, Capability, PutItem, Receive
from kvstore.hookspecs import hookimpl
from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import BackendPlugin, Registry
from kvstore.types import Call, Presence, PutStatus, ReadStatus


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
