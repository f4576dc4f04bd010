"""What a process was doing when it was killed, told by memory that outlives it.

A process counts itself into and out of phases in a mapped file.  It never gets to count itself out of those it is
killed in, so whoever reads the file afterwards knows where the kill came.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import os
import random
import signal
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PHASES: Final = ("open", "close", "publish", "eviction", "reclaim", "put_many", "clear", "delete", "get", "queue")
"""Most telling first: a put runs inside an open queue, a publication inside a put."""

IDLE: Final = "idle"
_COUNTERS: Final = struct.Struct(f"<{len(PHASES)}i")

_OBJECTS: Final = {
    "kvstore.objects.backend:ObjectBackend.put_many": "put_many",
    "kvstore.objects.backend:ObjectBackend.read_many": "get",
    "kvstore.objects.evictor:Evictor._evict_while": "eviction",
    "kvstore.objects.drops:Drops._clear": "reclaim",
}
_HOOKS: Final = {
    "lmdb": {
        "kvstore_lmdb.backend:LmdbBackend.put_many": "put_many",
        "kvstore_lmdb.backend:LmdbBackend.get_many": "get",
        "kvstore_lmdb.space:Space._evict_some": "eviction",
        "kvstore_lmdb.writer:Writer.reclaim": "reclaim",
        "kvstore_lmdb.writer:Writer._commit": "publish",
    },
    "nvme": {
        "kvstore_nvme.backend:NvmeBackend.put_many": "put_many",
        "kvstore_nvme.backend:NvmeBackend.read_many": "get",
        "kvstore_nvme.regions:Regions._empty": "eviction",
        "kvstore_nvme.changes:reclaim": "reclaim",
        "kvstore_nvme.writer:Writer._publish": "publish",
    },
    "tree": {**_OBJECTS, "kvstore_nvme.tree_medium:TreeMedium._publish": "publish"},
    "s3": {**_OBJECTS, "kvstore_s3.medium:S3Medium.write": "publish"},
}
"""What does the work of a phase, by the kind of medium."""


@dataclass(frozen=True)
class Trap:
    """Where a process kills itself: so long after the ``entry``-th time that it gets into a phase."""

    phase: str
    entry: int = 1
    delay_s: float = 0.0


class Board:
    """The counters of one process; made empty by whoever looks at them later."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as f:
            self._map = mmap.mmap(f.fileno(), _COUNTERS.size)
        self._lock = threading.Lock()
        self._trap: Trap | None = None
        self._entries = 0

    @classmethod
    def make(cls, path: Path) -> Board:
        path.write_bytes(bytes(_COUNTERS.size))
        return cls(path)

    def arm(self, trap: Trap) -> None:
        """Kill this process in a phase, between whichever two instructions the time is up."""
        self._trap = trap

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        i = PHASES.index(name)
        self._add(i, 1)
        if self._trap is not None and self._trap.phase == name:
            self._spring(self._trap)
        try:
            yield
        finally:
            self._add(i, -1)

    def _add(self, i: int, n: int) -> None:
        with self._lock:
            (now,) = struct.unpack_from("<i", self._map, 4 * i)
            struct.pack_into("<i", self._map, 4 * i, now + n)

    def _spring(self, trap: Trap) -> None:
        with self._lock:
            self._entries += 1
            due = self._entries == trap.entry
        if due and trap.delay_s:
            # nobody handles the signal, so it ends the process where it is, as SIGKILL does
            signal.setitimer(signal.ITIMER_REAL, trap.delay_s)
        elif due:
            os.kill(os.getpid(), signal.SIGKILL)

    def now(self) -> str:
        """The most telling of the phases that the process is in."""
        counts = _COUNTERS.unpack(self._map[:])
        return next((name for name, n in zip(PHASES, counts, strict=True) if n > 0), IDLE)

    def watch(self, kind: str) -> None:
        """Count this process in and out of the phases of a medium from now on."""
        for place, phase in _HOOKS[kind].items():
            module, _, path = place.partition(":")
            owner: Any = importlib.import_module(module)
            *parts, name = path.split(".")
            for part in parts:
                owner = getattr(owner, part)
            setattr(owner, name, self._counted(getattr(owner, name), phase))

    def _counted(self, work: Any, phase: str) -> Any:
        @functools.wraps(work)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return work(*args, **kwargs)

        return counted


def random_trap(rng: random.Random, phase: str) -> Trap:
    """Somewhere inside a phase: open and close are met once, the others many times."""
    once = phase in {"open", "close"}
    entry = 1 if once else rng.randint(1, 3 if phase in {"clear", "reclaim", "delete", "get"} else 12)
    delay_s = rng.choice((0.0, rng.uniform(0.0, 0.001), rng.uniform(0.0, 0.06 if once else 0.008)))
    return Trap(phase, entry, delay_s)
