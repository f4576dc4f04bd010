"""Names, bytes and calls that laws are tried on; needs no test tools."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore.backend import Backend, PutHint, PutItem, RecordInfo
from kvstore.types import Call, PutStatus, ReadStatus, Run

CALL_S: Final = 30.0  # long enough for a busy machine; laws about time bring their own
HEADER_BYTES: Final = 192
CHECKSUM_AT: Final = 184  # of the header checksum, eight bytes
_TILE_BYTES: Final = 65521  # longer records repeat; a prime, so that no two pages of them are alike
STORED: Final = frozenset({PutStatus.STORED, PutStatus.EXISTS})


def name_of(i: int | str) -> bytes:
    """A stored name as the core makes it: 49 bytes, equal in the first 17 for all ``i``."""
    return hashlib.sha256(b"namespace").digest()[:16] + b"\1" + hashlib.sha256(f"name {i}".encode()).digest()


def names_of(ids: Iterable[int | str]) -> list[bytes]:
    """Several :func:`name_of`."""
    return [name_of(i) for i in ids]


def bytes_of(i: int | str, nbytes: int) -> bytes:
    """Incompressible bytes that only ``i`` has; the same in every process."""
    once = hashlib.shake_256(f"bytes {i}".encode()).digest(min(nbytes, _TILE_BYTES))
    return once if nbytes <= _TILE_BYTES else (once * (nbytes // _TILE_BYTES + 1))[:nbytes]


def item_of(i: int | str, nbytes: int = 5000) -> PutItem:
    """Record ``i`` in two buffers, as the core hands it over."""
    data = bytes_of(i, nbytes)
    return PutItem(name_of(i), [data[:HEADER_BYTES], memoryview(data)[HEADER_BYTES:]])


def named(name: bytes, data: bytes) -> PutItem:
    """A record of given name and bytes in one buffer, its head as the core says it."""
    return PutItem(name, [data], head_bytes=min(len(data), HEADER_BYTES))


def chain(sequence: str, blocks: range, *, nbytes: int = 5000) -> list[PutItem]:
    """Consecutive blocks of one sequence with their places in it."""
    items = []
    for position in blocks:
        parent = name_of(f"{sequence}/{position - 1}") if position else b""
        item = item_of(f"{sequence}/{position}", nbytes)
        items.append(PutItem(item.name, item.buffers, PutHint(parent, position)))
    return items


def call(seconds: float = CALL_S, *, leading_only: bool = False, run: Run | None = None) -> Call:
    """A call that ends ``seconds`` from now."""
    made = Call.within(seconds, leading_only=leading_only)
    made.run = run
    return made


def put(backend: Backend, *items: PutItem) -> list[PutStatus]:
    """Store items in one call."""
    return backend.put_many(items, call())


def put_all(backend: Backend, items: Sequence[PutItem], *, most: int = 32) -> None:
    """Store items in calls of the core's size; every one must be taken."""
    for start in range(0, len(items), most):
        statuses = backend.put_many(items[start : start + most], call())
        assert set(statuses) <= STORED, f"put_many refused records: {statuses}"


class Received:
    """Collects what a read hands over, copied while it is valid."""

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}
        self.order: list[int] = []

    def __call__(self, i: int, view: memoryview) -> None:
        """The ``receive`` of a read."""
        self.order.append(i)
        self.data[i] = bytes(view)

    def of(self, statuses: Sequence[ReadStatus]) -> list[bytes | None]:
        """Bytes per name, None where nothing came; checks that statuses and deliveries agree."""
        came = {i for i, status in enumerate(statuses) if status is ReadStatus.OK}
        assert came == set(self.data), f"statuses {statuses} but records {sorted(self.data)} were delivered"
        assert len(self.order) == len(self.data), f"a record was delivered twice: {self.order}"
        return [self.data.get(i) for i in range(len(statuses))]


def read(backend: Backend, names: Sequence[bytes], limits: Call | None = None) -> list[bytes | None]:
    """Read names; None for whatever was not delivered."""
    received = Received()
    statuses = backend.get_many(names, received, limits or call())
    assert len(statuses) == len(names), f"{len(statuses)} statuses for {len(names)} names"
    return received.of(statuses)


def read_scattered(
    backend: Backend, names: Sequence[bytes], cut: Callable[[bytearray], list[memoryview]]
) -> list[bytes | None]:
    """Read names through ``read_many`` into buffers that ``cut`` makes of one bytearray."""
    memory: dict[int, bytearray] = {}
    received = Received()

    def place(i: int, info: RecordInfo) -> list[memoryview]:
        memory[i] = bytearray(info.nbytes)
        return cut(memory[i])

    statuses = backend.read_many(names, place, lambda i: received(i, memoryview(memory[i])), call())
    assert len(statuses) == len(names), f"{len(statuses)} statuses for {len(names)} names"
    return received.of(statuses)
