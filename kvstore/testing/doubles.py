"""Backends that wrap another one and misbehave, delay or remember: for tests of whatever stands above.

Each takes the backend it wraps, opened or not, so that a fault can be laid over any medium::

    registry, name = register_backend(lambda: FaultyBackend(MemoryBackend(), put_many=PutStatus.FULL))
    cache = KVCache.open({"l2": [{"backend": name}]}, spec=spec, namespace=namespace, registry=registry)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from kvstore.backend import (
    Backend,
    BackendContext,
    BatchShape,
    Capability,
    Place,
    PutItem,
    Receive,
    RecordInfo,
    Usage,
)
from kvstore.types import Call, Presence, PutStatus, ReadStatus

T = TypeVar("T")

_WHOLE_READS: Final = Capability.READ_INTO | Capability.RANGES


class WrappingBackend(Backend):
    """Passes every call on to ``inner``; subclasses change what they need.

    ``read_many`` and ``get_ranges`` are passed on too, so a subclass that changes what is read overrides
    all three, or overrides ``get_many`` and drops ``READ_INTO`` and ``RANGES`` as
    :class:`ReadWrappingBackend` does.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner: Final = inner
        self.capabilities = inner.capabilities  # type: ignore[misc]  # what the wrapped one declares

    def around(self, operation: str, work: Callable[[], T]) -> T:
        """Run one operation of the inner backend; the place for delays, faults and notes."""
        del operation
        return work()

    def open(self, context: BackendContext) -> None:
        """Open the inner backend."""
        self.around("open", lambda: self.inner.open(context))

    def close(self) -> None:
        """Close the inner backend."""
        self.around("close", self.inner.close)

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Read through."""
        return self.around("get_many", lambda: self.inner.get_many(names, receive, call))

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        """Read through."""
        return self.around("read_many", lambda: self.inner.read_many(names, place, done, call))

    def get_ranges(
        self, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
    ) -> list[ReadStatus]:
        """Read through."""
        return self.around("get_ranges", lambda: self.inner.get_ranges(names, ranges, receive, call))

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Store through."""
        return self.around("put_many", lambda: self.inner.put_many(items, call))

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Ask the inner backend."""
        return self.around("exists_many", lambda: self.inner.exists_many(names, call))

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """Delete through."""
        return self.around("delete_many", lambda: self.inner.delete_many(names, call))

    def discard(self, name: bytes, header_checksum: int) -> None:
        """Discard through."""
        self.around("discard", lambda: self.inner.discard(name, header_checksum))

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        """Ask the inner backend."""
        return self.around("epoch", lambda: self.inner.epoch(namespace, bump=bump))

    def touch_many(self, names: Sequence[bytes]) -> None:
        """Touch through."""
        self.around("touch_many", lambda: self.inner.touch_many(names))

    def drop(self, name_prefix: bytes) -> None:
        """Drop through."""
        self.around("drop", lambda: self.inner.drop(name_prefix))

    def namespaces(self) -> list[bytes]:
        """Ask the inner backend."""
        return self.around("namespaces", self.inner.namespaces)

    def scan(self) -> Iterator[RecordInfo]:
        """List the inner backend's records."""
        return self.around("scan", self.inner.scan)

    def usage(self) -> Usage:
        """Ask the inner backend."""
        return self.around("usage", self.inner.usage)

    def batch_shape(self) -> BatchShape:
        """Ask the inner backend."""
        return self.inner.batch_shape()

    def maintain(self) -> None:
        """Maintain the inner backend."""
        self.around("maintain", self.inner.maintain)

    def describe(self) -> dict[str, str]:
        """Ask the inner backend."""
        return self.inner.describe()


class ReadWrappingBackend(WrappingBackend):
    """For doubles that change what is read: every way to read goes through ``get_many``."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.capabilities = inner.capabilities & ~_WHOLE_READS  # type: ignore[misc]  # as in the parent

    read_many = Backend.read_many
    get_ranges = Backend.get_ranges


class FaultyBackend(WrappingBackend):
    """Fails chosen operations while :attr:`failing` is set.

    Args:
        inner: The backend.
        faults: Operation to what it does instead: an exception to raise, or a status that is given for
            every name (``get_many=ReadStatus.TIMEOUT``, ``put_many=PutStatus.FULL``,
            ``exists_many=Presence.UNKNOWN``).
    """

    def __init__(self, inner: Backend, **faults: BaseException | ReadStatus | PutStatus | Presence) -> None:
        super().__init__(inner)
        unknown = [operation for operation in faults if not hasattr(Backend, operation)]
        if unknown:
            msg = f"Backend has no operation {unknown[0]!r}"
            raise TypeError(msg)
        self.faults: Final[dict[str, Any]] = faults
        self.failing = True

    def around(self, operation: str, work: Callable[[], T]) -> T:
        """Raise where that is the fault."""
        fault = self.faults.get(operation)
        if self.failing and isinstance(fault, BaseException):
            raise fault
        return work()

    def _status(self, operation: str) -> Any:
        fault = self.faults.get(operation)
        return None if not self.failing or isinstance(fault, BaseException) else fault

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Answer the fault's status for every name, or read."""
        status = self._status("get_many")
        return super().get_many(names, receive, call) if status is None else [status] * len(names)

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Answer the fault's status for every item, or store."""
        status = self._status("put_many")
        return super().put_many(items, call) if status is None else [status] * len(items)

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Answer the fault's status for every name, or ask."""
        status = self._status("exists_many")
        return super().exists_many(names, call) if status is None else [status] * len(names)


class SlowBackend(WrappingBackend):
    """Adds a round trip to chosen operations, as a distant medium does.

    Args:
        inner: The backend.
        seconds: Added to each call.
        operations: Which ones; all data operations by default.
    """

    def __init__(
        self,
        inner: Backend,
        seconds: float,
        operations: Sequence[str] = ("get_many", "read_many", "get_ranges", "put_many", "exists_many", "delete_many"),
    ) -> None:
        super().__init__(inner)
        self.capabilities = inner.capabilities & ~Capability.CALLER_READS  # type: ignore[misc]  # no memory is slow
        self.seconds = seconds
        self._operations: Final = frozenset(operations)

    def around(self, operation: str, work: Callable[[], T]) -> T:
        """Wait, then do it."""
        if operation in self._operations:
            time.sleep(self.seconds)
        return work()


class HangingBackend(WrappingBackend):
    """Hangs in chosen operations until :meth:`release`, whatever their deadline says.

    Args:
        inner: The backend.
        operations: Which ones.
        limit_s: When a hanging operation goes on although nobody released it, so that no test hangs.
    """

    def __init__(self, inner: Backend, operations: Sequence[str] = ("get_many",), limit_s: float = 30.0) -> None:
        super().__init__(inner)
        self._operations: Final = frozenset(operations)
        self._limit_s: Final = limit_s
        self._gate: Final = threading.Event()
        self.entered: Final = threading.Event()
        """Set once an operation hangs."""

    def around(self, operation: str, work: Callable[[], T]) -> T:
        """Wait for the gate, then do it."""
        if operation in self._operations:
            self.entered.set()
            self._gate.wait(self._limit_s)
        return work()

    def hang(self) -> None:
        """Let operations hang again after a release."""
        self.entered.clear()
        self._gate.clear()

    def release(self) -> None:
        """Let all operations go on, those to come too."""
        self._gate.set()


class RecordingBackend(WrappingBackend):
    """Remembers what reaches it, in order.

    Attributes:
        operations: Names of the operations.
        put_items: Every item given to ``put_many``, its buffers copied.
        asked: Names per call of ``get_many``, ``read_many`` and ``get_ranges``.
        calls: The ``call`` argument of reads, for its ``run`` and ``leading_only``.
        touched: Names per call of ``touch_many``.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.operations: list[str] = []
        self.put_items: list[PutItem] = []
        self.asked: list[list[bytes]] = []
        self.calls: list[Call] = []
        self.touched: list[list[bytes]] = []

    def around(self, operation: str, work: Callable[[], T]) -> T:
        """Note the operation."""
        self.operations.append(operation)
        return work()

    def _note(self, names: Sequence[bytes], call: Call) -> None:
        self.asked.append(list(names))
        self.calls.append(call)

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Note names and limits."""
        self._note(names, call)
        return super().get_many(names, receive, call)

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        """Note names and limits."""
        self._note(names, call)
        return super().read_many(names, place, done, call)

    def get_ranges(
        self, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
    ) -> list[ReadStatus]:
        """Note names and limits."""
        self._note(names, call)
        return super().get_ranges(names, ranges, receive, call)

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Keep a copy of each item."""
        self.put_items += [PutItem(i.name, [bytes(b) for b in i.buffers], i.hint, i.head_bytes) for i in items]
        return super().put_many(items, call)

    def touch_many(self, names: Sequence[bytes]) -> None:
        """Note the names."""
        self.touched.append(list(names))
        super().touch_many(names)


class TornBackend(ReadWrappingBackend):
    """Hands out damaged copies of what is stored.

    Args:
        inner: The backend.
        tear: Makes the damaged bytes of the good ones; by default the second half is zeros.
    """

    def __init__(self, inner: Backend, tear: Callable[[bytes], bytes] | None = None) -> None:
        super().__init__(inner)
        self._tear: Final = tear or _zero_half

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Damage each record on its way."""

        def torn(i: int, view: memoryview) -> None:
            receive(i, memoryview(self._tear(bytes(view))))

        return super().get_many(names, torn, call)


class LyingBackend(ReadWrappingBackend):
    """Says that everything is there and was delivered, and delivers nothing."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Claim success."""
        del receive, call
        return [ReadStatus.OK] * len(names)

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Claim presence."""
        del call
        return [Presence.PRESENT] * len(names)


def _zero_half(good: bytes) -> bytes:
    half = len(good) // 2
    return good[:half] + bytes(len(good) - half)
