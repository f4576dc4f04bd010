"""What the NVMe tests share: names, records, and real processes that use a store."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore_nvme.backend import NvmeBackend
from kvstore_nvme.options import NvmeOptions
from kvstore_nvme.slot import PAGE_BYTES, Slot

from kvstore.backend import BackendContext, PutItem, RecordInfo
from kvstore.types import Call, PutStatus, ReadStatus

__all__ = [
    "MIB", "BackendContext", "Call", "NvmeBackend", "NvmeOptions", "Opener", "PutItem", "PutStatus", "ReadStatus",
    "bytes_of", "call", "files_bytes", "item_of", "name_of", "put", "put_each", "read", "read_into", "run", "script",
    "slots_on_disk",
]  # fmt: skip

Opener = Callable[..., NvmeBackend]
MIB = 1 << 20
HEAD_BYTES = 224


def name_of(i: int | str) -> bytes:
    """A stored name as the core makes it: 49 bytes."""
    return hashlib.sha256(str(i).encode()).digest()[:16] + b"\1" + hashlib.sha256(f"d{i}".encode()).digest()


def bytes_of(i: int | str, nbytes: int) -> bytes:
    """Incompressible bytes that only ``i`` has."""
    return hashlib.shake_256(str(i).encode()).digest(nbytes)


def item_of(i: int | str, nbytes: int = 5000) -> PutItem:
    """A record in two buffers, as the core hands it over."""
    data = bytes_of(i, nbytes)
    return PutItem(name_of(i), [data[:HEAD_BYTES], memoryview(data)[HEAD_BYTES:]])


def call() -> Call:
    return Call.within(30.0)


def put(backend: NvmeBackend, *items: PutItem) -> list[PutStatus]:
    return backend.put_many(items, call())


def put_each(backend: NvmeBackend, indices: Sequence[int], nbytes: int) -> list[PutStatus]:
    """Put one record a call."""
    return [put(backend, item_of(i, nbytes))[0] for i in indices]


def read(backend: NvmeBackend, names: Sequence[bytes]) -> list[bytes | None]:
    """Read names; None for whatever was not delivered."""
    found: list[bytes | None] = [None] * len(names)

    def receive(i: int, view: memoryview) -> None:
        found[i] = bytes(view)

    statuses = backend.get_many(names, receive, call())
    assert [s is ReadStatus.OK for s in statuses] == [f is not None for f in found]
    return found


def read_into(backend: NvmeBackend, names: Sequence[bytes]) -> list[bytes | None]:
    """Like :func:`read`, into memory laid out as in L1: the payload on a page boundary."""
    frames: dict[int, memoryview] = {}
    done: list[int] = []

    def place(i: int, info: RecordInfo) -> Sequence[memoryview]:
        pages = -(-info.nbytes // PAGE_BYTES) + 1
        start = PAGE_BYTES - info.head_bytes % PAGE_BYTES
        frames[i] = memoryview(mmap.mmap(-1, (pages + 1) * PAGE_BYTES))[start : start + info.nbytes]
        return [frames[i]]

    statuses = backend.read_many(names, place, done.append, call())
    assert [s is ReadStatus.OK for s in statuses] == [i in done for i in range(len(names))]
    return [bytes(frames[i]) if i in done else None for i in range(len(names))]


def files_bytes(store: Path) -> int:
    """Space of all files under a directory: the longer of length and blocks of each."""
    total = 0
    for path in store.rglob("*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if not path.is_dir():
            total += max(found.st_size, found.st_blocks * 512)
    return total


def slots_on_disk(store: Path) -> list[tuple[Path, int, Slot]]:
    """Every sound slot header in the segment files, with its place."""
    found = []
    for path in sorted(store.glob("seg-*")):
        data = path.read_bytes()
        for at in range(0, len(data), PAGE_BYTES):
            slot = Slot.parse(memoryview(data)[at : at + PAGE_BYTES])
            if slot is not None:
                found.append((path, at, slot))
    return found


PRELUDE = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.unit.nvme.stores import *
STORE = Path(sys.argv[1])
def start(capacity_bytes=64 * MIB, **context):
    backend = NvmeBackend()
    backend.open(BackendContext(tier="l2", options=NvmeOptions(path=str(STORE)), capacity_bytes=capacity_bytes, **context))
    return backend
"""


def script(code: str, store: Path, *args: str) -> list[str]:
    """Command line of a Python process that runs ``code`` on ``store``."""
    prelude = PRELUDE.format(root=str(Path(__file__).parents[3]))
    return [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(code), str(store), *args]


def run(code: str, store: Path, *args: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own and return what it did."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": ""}
    return subprocess.run(
        script(code, store, *args), capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
    )
