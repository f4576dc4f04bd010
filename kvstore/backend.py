"""The contract between the core and a storage medium: names in, bytes out.

A backend author subclasses :class:`Backend`, declares an options dataclass and a
:class:`~kvstore.plugins.BackendPlugin`, runs the conformance suite and is done.  Backends see
opaque names (49 bytes) and self-describing records; they never see tokens, tensors or namespaces
and need not verify anything: the core does.
"""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvstore.errors import NotSupportedError
from kvstore.types import Call, Presence, PutStatus, ReadStatus

Durability = Literal["cache", "durable"]

Receive = Callable[[int, memoryview], None]
"""``receive(i, view)``: record ``i`` as one contiguous view, valid only during the call."""

Place = Callable[[int, "RecordInfo"], "Sequence[memoryview] | None"]
"""``place(i, info)``: writable buffers for record ``i``, or None to skip it."""


class Capability(enum.Flag):
    """What a backend can do; always positive, and the conformance suite proves each both ways."""

    NONE = 0
    PERSISTENT = enum.auto()
    """Records survive close and reopen, also in another process."""
    SHARED = enum.auto()
    """Several processes may open the same place at once."""
    CALLER_READS = enum.auto()
    """Reads are memory accesses that the calling thread may do itself; records of a
    ``get_many`` arrive in the order of the names."""
    READ_INTO = enum.auto()
    """``read_many`` reads straight into the buffers that ``place`` names."""
    SCAN = enum.auto()
    """``scan`` lists what is stored."""
    TTL = enum.auto()
    """Records may expire by age."""
    CONDITIONAL_PUT = enum.auto()
    """A put of a stored name answers ``EXISTS`` by itself, at no more cost than asking first."""
    EVICTS = enum.auto()
    """The backend keeps its stored bytes within the capacity by evicting."""
    PARALLEL = enum.auto()
    """One read call uses several threads by itself, so the core hands a call over whole; ``receive``,
    ``place`` and ``done`` may then run in several threads at once (never twice for one record)."""
    RANGES = enum.auto()
    """``get_ranges`` moves the bytes asked for and not much more."""
    PACKS = enum.auto()
    """Runs of consecutive blocks are stored as one object, found through :attr:`Call.run`."""
    DEVICE_DIRECT = enum.auto()
    """Buffers may lie in an accelerator's memory (GPUDirect Storage).  Reserved: the core of this
    version hands out host memory only, and the conformance suite refuses the flag."""


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What a medium knows about a record without decoding it.

    Attributes:
        name: Stored name, 49 bytes from the core.
        head_bytes: Length of the record's head (header and segment table); 0 when unknown.
        payload_bytes: Length of what follows the head.
        codec_id: Codec of the record; -1 when unknown.
        last_use: Unix time in seconds of the last use or write; 0.0 when unknown.
    """

    name: bytes
    head_bytes: int
    payload_bytes: int
    codec_id: int = -1
    last_use: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return self.head_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class PutHint:
    """Where a block stands, for backends that place or evict by it.

    Attributes:
        parent: Name of the block before it, ``b""`` for a first or unknown one.
        position: Absolute block index in its sequence, -1 when unknown; evict high positions before
            low ones.
        lifetime: Seconds after which the block is worthless; 0.0 for no statement.
    """

    parent: bytes = b""
    position: int = -1
    lifetime: float = 0.0


@dataclass(frozen=True, slots=True)
class PutItem:
    """One record to store.

    Attributes:
        name: Stored name, 49 bytes from the core; anything from 1 to 255 bytes must work.
        buffers: Gather list of C-contiguous byte buffers, in the order of the record's bytes.  They
            belong to the caller and stay unchanged until put_many returns.
        hint: Position and lifetime.
        head_bytes: Length of the record's head (header and segment table), which a backend may
            place apart from the payload; 0 when it is exactly the first buffer.
    """

    name: bytes
    buffers: Sequence[memoryview | bytes]
    hint: PutHint = field(default_factory=PutHint)
    head_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return sum(len(b) if isinstance(b, bytes) else b.nbytes for b in self.buffers)


@dataclass(frozen=True, slots=True)
class Usage:
    """Space on the medium, in bytes.

    Attributes:
        records: Live records.
        payload_bytes: Bytes that count against the capacity, overhead included.
        file_bytes: Bytes really taken from the medium (files, with free pages); 0 when unknown.
        capacity_bytes: The configured bound; 0 when unbounded.
        evicted: Records evicted since open, by this process.
        orphaned_bytes: Live payload whose parent is no longer stored, so that no prefix reaches it,
            as of the backend's last look; 0 when it does not look.
    """

    records: int = 0
    payload_bytes: int = 0
    file_bytes: int = 0
    capacity_bytes: int = 0
    evicted: int = 0
    orphaned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How many records of one sequence ``put_many`` likes to get at once.

    Attributes:
        blocks: Records at most.
        nbytes: Raw bytes at which a batch is full.
        align: A batch of a sequence ends where a block's position + 1 is a multiple of this.
    """

    blocks: int = 32
    nbytes: int = 8 << 20
    align: int = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that ``kvstore doctor`` found out about a medium.

    Attributes:
        level: ``"ok"``, ``"warning"`` (works, but not as well as it could) or ``"problem"``.
        what: What was looked at and what was found, with the value.
        advice: What to do about it; empty when nothing is to be done.
    """

    level: Literal["ok", "warning", "problem"]
    what: str
    advice: str = ""


def _ignore(names: Sequence[bytes]) -> None:
    """Nobody listens to evictions."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What the core gives a backend when it opens it.

    Attributes:
        tier: Name of the tier in the config, for messages.
        options: Instance of the plugin's options dataclass.
        capacity_bytes: Budget on the medium; None leaves it to the backend's default.
        durability: ``"cache"`` may lose the newest records on power loss; ``"durable"`` may not
            lose what ``put_many`` reported as stored.
        namespace_json: Human-readable description of the namespace, to be kept beside the data
            under ``namespace`` (its 16 digest bytes) where the medium allows it.
        removed: Call with a list of names when records left the medium by eviction; cheap,
            thread-safe.
        read_only: Open without creating or changing anything; raise if nothing is there.
        block_bytes: Raw bytes of one block of the cache that opens the tier, with what sealing adds
            to it where the tier's codec seals; 0 when unknown.
        logger: For at most one line per event.
    """

    tier: str
    options: Any
    capacity_bytes: int | None = None
    durability: Durability = "cache"
    namespace: bytes = b""
    namespace_json: str = "{}"
    removed: Callable[[Sequence[bytes]], None] = _ignore
    read_only: bool = False
    block_bytes: int = 0
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("kvstore.backend"))


class Backend(ABC):
    """Base class of every storage medium; bytes only.

    All methods may run concurrently from several threads, except that ``open`` is first and
    ``close`` last.  Data methods raise nothing but :class:`~kvstore.errors.BackendError`
    subclasses and :class:`~kvstore.errors.ClosedError`; per-name trouble is a status.
    A subclass overrides ``get_many`` or ``read_many`` (or both); each default builds on the other.
    """

    capabilities: ClassVar[Capability] = Capability.NONE

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.get_many is Backend.get_many and cls.read_many is Backend.read_many:
            msg = f"{cls.__qualname__} must override get_many or read_many"
            raise TypeError(msg)

    @abstractmethod
    def open(self, context: BackendContext) -> None:
        """Open or create the store.

        Raises:
            ConfigError: An option is wrong; the message names it.
            BackendError: The medium cannot be used; the message says what to do.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything within 5 s; calling it again does nothing."""

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Hand each stored record to ``receive``; return one status per name, in order.

        ``receive`` may be called in any order and from any thread unless ``CALLER_READS`` is
        declared, and never after the method has returned.  Exceptions from ``receive`` propagate
        after resources are released.
        """
        buffers: dict[int, bytearray] = {}

        def place(i: int, info: RecordInfo) -> Sequence[memoryview]:
            buffers[i] = bytearray(info.nbytes)
            return [memoryview(buffers[i])]

        def done(i: int) -> None:
            receive(i, memoryview(buffers.pop(i)).toreadonly())

        return self.read_many(names, place, done, call)

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        """Read records into the buffers that ``place`` gives; ``done(i)`` follows each full one.

        The buffers of one record are a scatter list whose total length is ``info.nbytes``.  After
        the method has returned nothing calls back or writes into them any more.
        """

        def receive(i: int, view: memoryview) -> None:
            targets = place(i, RecordInfo(names[i], 0, view.nbytes))
            if targets is None:
                return
            start = 0
            for target in targets:
                target[:] = view[start : start + target.nbytes]
                start += target.nbytes
            done(i)

        return self.get_many(names, receive, call)

    def get_ranges(
        self, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
    ) -> list[ReadStatus]:
        """Hand bytes ``[start, stop)`` of each stored record to ``receive``; otherwise like ``get_many``.

        A range that reaches beyond the record's end is cut there.  The default reads whole records;
        ``RANGES`` says that the backend does better.
        """

        def cut(i: int, view: memoryview) -> None:
            start, stop = ranges[i]
            receive(i, view[start:stop])

        return self.get_many(names, cut, call)

    @abstractmethod
    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Store records, each one atomically and published last; one status per item, in order.

        A reader sees the old record, the new one or none, never a mixture.  A name that is
        already stored may be left alone (``EXISTS``, its age refreshed) or replaced (``STORED``).
        """

    @abstractmethod
    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Say for each name whether it is stored; reads no payload, touches no recency."""

    @abstractmethod
    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """Delete records; return how many were there.  An absent name is not an error."""

    @abstractmethod
    def discard(self, name: bytes, header_checksum: int) -> None:
        """Drop the record under ``name`` if its bytes 184..192 still hold ``header_checksum``.

        The core calls it for a record that failed verification.  The comparison keeps it from
        dropping the good copy with which another process has repaired the record meanwhile.
        Records shorter than 192 bytes are dropped whatever ``header_checksum`` is.
        """

    @abstractmethod
    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        """Return the 8 random bytes kept for ``namespace``; make new ones when absent or ``bump``.

        They are mixed into every name, so a new value empties the namespace at once for all
        processes.  Losing them costs a cold start, never an old record.  Called before every
        batch, so it must be cheap (a cached value with a bounded age is fine on remote media).
        """

    def touch_many(self, names: Sequence[bytes]) -> None:
        """Note one use of records, listed from the tail of a prefix to its head; lossy is fine."""

    def drop(self, name_prefix: bytes) -> None:
        """Reclaim, in the background or bit by bit, records whose name starts with the prefix."""

    def namespaces(self) -> list[bytes]:
        """Return the descriptions of namespaces that are kept beside the data, as ``namespace_json`` gave them.

        They are for people and tools, such as ``explain``, which asks for them seldom.  What is missing or
        cannot be read is left out; a few hundred are enough.  The default knows none.

        Raises:
            BackendError: The medium failed.
        """
        return []

    def scan(self) -> Iterator[RecordInfo]:
        """List stored records in any order.

        Raises:
            NotSupportedError: The backend does not declare ``SCAN``.
        """
        msg = f"{type(self).__name__} cannot list its records (capability SCAN is not declared)"
        raise NotSupportedError(msg)

    @abstractmethod
    def usage(self) -> Usage:
        """Space taken on the medium; cheap enough to call once a second."""

    def batch_shape(self) -> BatchShape:
        """How the core should cut its writes into calls of ``put_many``; asked once, after ``open``."""
        return BatchShape()

    def maintain(self) -> None:
        """Do small background work; the core calls it about once a second from its own thread."""

    def describe(self) -> dict[str, str]:
        """Facts for ``stat`` and ``doctor``: where the data lie, I/O mode, format; no secrets."""
        return {}


def where(path: str | Path) -> str:
    """Render a path for messages: absolute, never resolved through links."""
    return str(Path(path).absolute())
