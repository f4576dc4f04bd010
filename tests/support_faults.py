"""What the fault scenarios share: blocks, keys, what a process must give back, and files that fail on request."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import mmap
import re
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace

SMALL: Final = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")  # 32 KiB
LARGE: Final = BlockSpec(layers=32, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")  # 2 MiB
NAMESPACE: Final = Namespace(model="faults", revision="r1")
SOURCE: Final = Path(__file__).with_name("data") / "iofault.c"


# -- blocks and keys


def noise(spec: BlockSpec, ids: Sequence[int]) -> torch.Tensor:
    """Incompressible blocks in which every bit pattern occurs; the id alone decides the bytes."""
    raw = b"".join(hashlib.shake_128(b"block %d" % i).digest(spec.nbytes) for i in ids)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(spec.torch_dtype()).view(len(ids), *spec.shape)


def gauss(spec: BlockSpec, ids: Sequence[int]) -> torch.Tensor:
    """Blocks as models make them: normally distributed, so that codecs shorten them."""
    rows = [np.random.default_rng(i).standard_normal(spec.nbytes // spec.itemsize, np.float32) for i in ids]
    return torch.from_numpy(np.stack(rows)).to(spec.torch_dtype()).view(len(ids), *spec.shape)


def unrelated(i: int, spec: BlockSpec = SMALL) -> KVCacheKey:
    """A key of one block that shares nothing with the others; ``u(i)`` of the scenarios."""
    return KVCacheKey.from_tokens([i, *range(spec.block_tokens - 1)], block_tokens=spec.block_tokens)


def chain(n_blocks: int, *, seed: int = 0, spec: BlockSpec = SMALL) -> KVCacheKey:
    """A key of consecutive blocks of one sequence; ``k(0..n)`` of the scenarios."""
    ids = np.random.default_rng(seed).integers(0, 50_000, n_blocks * spec.block_tokens)
    return KVCacheKey.from_tokens(ids, block_tokens=spec.block_tokens)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits, so that NaN equals itself."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((a.view(torch.uint8) == b.view(torch.uint8)).all())


UNTOUCHED: Final = 0xA5


def target(spec: BlockSpec, n_blocks: int = 1) -> torch.Tensor:
    """A destination in which every byte that nobody wrote is recognised."""
    raw = torch.full((n_blocks * spec.nbytes,), UNTOUCHED, dtype=torch.uint8)
    return raw.view(spec.torch_dtype()).view(n_blocks, *spec.shape)


def untouched(out: torch.Tensor) -> bool:
    return bool((out.view(torch.uint8) == UNTOUCHED).all())


# -- laws that every call and every closed cache must keep


class WatchedCache:
    """A cache whose calls are timed, and whose counters must add up when it is closed.

    Args:
        cache: The cache; closing the watched one closes it.
        limit_s: How long any call may take (G5), closing included.
    """

    def __init__(self, cache: KVCache, limit_s: float) -> None:
        self.cache: Final = cache
        self.limit_s: Final = limit_s
        self.slow: list[str] = []
        self.peaks: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cache, name)
        return self._timed(name, value) if callable(value) and not name.startswith("_") else value

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.monotonic() - start
                self.peaks[name] = max(seconds, self.peaks.get(name, 0.0))
                if name != "flush" and seconds > self.limit_s:  # a flush is told how long it may take
                    self.slow.append(f"{name} took {seconds:.2f} s, more than {self.limit_s:.2f} s")

        return timed

    def fetch(self, key: KVCacheKey) -> torch.Tensor | None:
        """One block, or None; a miss must leave the destination alone."""
        out = target(self.cache.spec)
        if self.get(key, out) == 1:
            return out
        assert untouched(out), "a miss wrote into the destination"
        return None

    def store(self, key: KVCacheKey, blocks: torch.Tensor) -> None:
        """Put and wait until it is stored or refused."""
        self.put(key, blocks)
        self.flush(60)

    def tier(self, name: str) -> Any:
        """Counters of one tier."""
        return next(t for t in self.cache.stats().tiers if t.name == name)

    def check(self) -> None:
        """G5 and G9: every call ended in time, and the counters add up."""
        assert not self.slow, self.slow
        stats = self.cache.stats()
        asked: list[Any] = [stats.cache, *(t.counters for t in stats.tiers)]
        for counters in asked:
            assert counters.lookups == counters.hits + counters.misses, counters
        l1_hits, tier_hits = stats.cache.l1_hits, sum(t.counters.hits for t in stats.tiers)
        assert stats.cache.hits == l1_hits + tier_hits, stats

    def close(self) -> None:
        try:
            self.check()
        finally:
            self._timed("close", self.cache.close)()
        assert not self.slow, self.slow

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.cache.close()


@dataclass(frozen=True)
class Residue:
    """What a process holds: threads, files and sockets, children (G6)."""

    threads: frozenset[str]
    files: tuple[str, ...]

    @classmethod
    def now(cls) -> Residue:
        files = []
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the listing's own
                leads_to = str(fd.readlink())
                if not re.match(r"/proc/|/dev/(null|pts)|pipe:|anon_inode", leads_to):
                    files.append(re.sub(r"socket:\[\d+\]", "socket", leads_to))
        threads = frozenset(t.name for t in threading.enumerate() if t.name.startswith("kvstore"))
        return cls(threads, tuple(sorted(files)))

    def left_since(self, before: Residue) -> list[str]:
        """What is here now and was not before."""
        more = list(self.files)
        for name in before.files:
            if name in more:
                more.remove(name)
        return sorted(self.threads - before.threads) + more


def rss_bytes() -> int:
    """Memory that this process really takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def left_behind(before: Residue, patience_s: float = 5.0) -> list[str]:
    """What is still held after a little patience: threads end after the call that told them to."""
    deadline = time.monotonic() + patience_s
    while (left := Residue.now().left_since(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


# -- files that fail on request


class Fault(enum.IntEnum):
    """What goes wrong; the numbers are those of ``data/iofault.c``."""

    OFF = 0
    ENOSPC = 1
    EIO_WRITE = 2
    SHORT_WRITE = 3
    EIO_READ = 4
    SHORT_READ = 5
    EIO_FSYNC = 6
    EXDEV_RENAME = 7
    EMFILE = 8
    SLOW = 9
    EINVAL_DIRECT_OPEN = 10
    EINVAL_DIRECT_IO = 11
    EOPNOTSUPP_FALLOCATE = 12
    EROFS = 13


_CONTROL = struct.Struct("<iiiiqq")


class FaultSwitch:
    """The control file of the shim: choose a fault, ask how often it was met.  For any process."""

    def __init__(self, path: Path) -> None:
        self.make(path)
        with path.open("r+b") as f:
            self._map = mmap.mmap(f.fileno(), _CONTROL.size)

    @staticmethod
    def make(path: Path) -> None:
        """Make the control file, with no fault chosen, unless it is there."""
        if not path.exists():
            path.write_bytes(bytes(_CONTROL.size))

    def set(self, fault: Fault, *, after: int = 0, every: int = 1, delay_ms: int = 0) -> None:
        """Let ``after`` calls of the fault's kind pass, then fail each ``every``-th."""
        self._map[4:] = _CONTROL.pack(0, after, every, delay_ms, 0, 0)[4:]
        self._map[:4] = struct.pack("<i", fault)

    def off(self) -> None:
        self._map[:4] = struct.pack("<i", Fault.OFF)

    @property
    def injected(self) -> int:
        """Calls that failed since ``set``."""
        return int(_CONTROL.unpack(self._map[:])[5])


def build_shim(folder: Path) -> Path | None:
    """Compile the shim; None where no C compiler is installed."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "iofault.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
    return library
