"""What the LMDB tests share: names, records, and real processes that use a store."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from kvstore_lmdb.backend import LmdbBackend
from kvstore_lmdb.options import LmdbOptions

from kvstore.backend import BackendContext, PutItem
from kvstore.types import Call, PutStatus, ReadStatus

__all__ = [
    "MIB", "BackendContext", "Call", "LmdbBackend", "LmdbOptions", "Opener", "PutItem", "PutStatus", "ReadStatus",
    "bytes_of", "call", "item_of", "name_of", "put", "read", "run", "script",
]  # fmt: skip

Opener = Callable[..., LmdbBackend]
MIB = 1 << 20


def name_of(i: int | str) -> bytes:
    """A stored name as the core makes it: 49 bytes."""
    return hashlib.sha256(str(i).encode()).digest()[:16] + b"\1" + hashlib.sha256(f"d{i}".encode()).digest()


def bytes_of(i: int | str, nbytes: int) -> bytes:
    """Incompressible bytes that only ``i`` has."""
    return hashlib.shake_256(str(i).encode()).digest(nbytes)


def item_of(i: int | str, nbytes: int = 5000) -> PutItem:
    """A record in two buffers, as the core hands it over."""
    data = bytes_of(i, nbytes)
    return PutItem(name_of(i), [data[:192], memoryview(data)[192:]])


def call() -> Call:
    return Call.within(30.0)


def put(backend: LmdbBackend, *items: PutItem) -> list[PutStatus]:
    return backend.put_many(items, call())


def read(backend: LmdbBackend, names: list[bytes]) -> list[bytes | None]:
    """Read names; None for whatever was not delivered."""
    found: list[bytes | None] = [None] * len(names)

    def receive(i: int, view: memoryview) -> None:
        found[i] = bytes(view)

    statuses = backend.get_many(names, receive, call())
    assert [s is ReadStatus.OK for s in statuses] == [f is not None for f in found]
    return found


PRELUDE = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.unit.lmdb.stores import *
STORE = Path(sys.argv[1])
def start(capacity_bytes=64 * MIB, **context):
    backend = LmdbBackend()
    backend.open(BackendContext(tier="l2", options=LmdbOptions(path=str(STORE)), capacity_bytes=capacity_bytes, **context))
    return backend
"""


def script(code: str, store: Path, *args: str) -> list[str]:
    """Command line of a Python process that runs ``code`` on ``store``."""
    prelude = PRELUDE.format(root=str(Path(__file__).parents[3]))
    return [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(code), str(store), *args]


def run(
    code: str, store: Path, *args: str, stdin: str = "", timeout_s: float = 30.0
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own and return what it did."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": ""}
    return subprocess.run(
        script(code, store, *args),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )
