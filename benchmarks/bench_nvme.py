"""NVMe backend beside plain pwrite and pread with the same flags, threads, sizes and file system.

    python benchmarks/bench_nvme.py [--dir DIR] [--rounds 5] [--threads 4] [--mib 512]

The raw medium is one preallocated file, written in order and read at random block positions by as
many threads (in order, where whole prompts go through the cache).  With direct I/O the page cache
plays no part in either.  Raw and ours alternate; every figure is the best of the rounds and the ratio
the median of the rounds' own.  ``verified`` decodes each record where it was read, as the core does.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from kvstore_nvme.backend import NvmeBackend
from kvstore_nvme.options import NvmeOptions

from benchmarks.bench_cache import NAMESPACE, Rig, make_rig
from kvstore import KVCache
from kvstore.backend import BackendContext, PutItem, RecordInfo
from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.record import RecordMeta
from kvstore.types import Call, PutStatus, ReadStatus

PAGE = 4096
PUT_RECORDS = 32
PUT_BYTES = 8 << 20
LOOKUPS = 4096


@dataclass
class Slots:
    """Aligned memory for blocks, each with a page in front of it, as in L1."""

    block_bytes: int
    count: int
    memory: mmap.mmap

    @classmethod
    def make(cls, block_bytes: int, count: int) -> Slots:
        slots = cls(block_bytes, count, mmap.mmap(-1, (PAGE + block_bytes) * count))
        np.frombuffer(slots.memory, np.uint8)[:] = 1
        return slots

    def frame(self, i: int) -> memoryview:
        start = i * (PAGE + self.block_bytes)
        return memoryview(self.memory)[start : start + PAGE + self.block_bytes]

    def block(self, i: int) -> memoryview:
        return self.frame(i)[PAGE:]


def in_threads(work: Callable[[range], None], count: int, threads: int) -> float:
    """Run ``work`` on strided shares of ``count`` indices; return the seconds until all are done."""
    barrier = threading.Barrier(threads + 1)

    def run(k: int) -> None:
        barrier.wait()
        work(range(k, count, threads))

    workers = [threading.Thread(target=run, args=(k,)) for k in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


class Raw:
    """One preallocated file."""

    def __init__(self, path: Path, slots: Slots, *, direct: bool) -> None:
        self.slots = slots
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(self.fd, 0, slots.block_bytes * slots.count)
        self.order = np.random.default_rng(1).permutation(slots.count)

    def put(self, threads: int) -> float:
        def work(share: range) -> None:
            for i in share:
                os.pwritev(self.fd, [self.slots.block(i)], i * self.slots.block_bytes)

        return in_threads(work, self.slots.count, threads)

    def get(self, threads: int) -> float:
        def work(share: range) -> None:
            for k in share:
                i = int(self.order[k])
                os.preadv(self.fd, [self.slots.block(i)], i * self.slots.block_bytes)

        return in_threads(work, self.slots.count, threads)

    def close(self) -> None:
        os.close(self.fd)


class Ours:
    """The backend under test, filled with records of real format."""

    def __init__(self, path: Path, rig: Rig, slots: Slots, *, direct: bool) -> None:
        self.slots = slots
        self.rig = rig
        self.backend = NvmeBackend()
        capacity = 2 * slots.count * (slots.block_bytes + PAGE) + (64 << 20)
        options = NvmeOptions(path=str(path), direct=None if direct else False)
        self.backend.open(
            BackendContext(tier="bench", options=options, capacity_bytes=capacity, block_bytes=slots.block_bytes)
        )
        self.lap = 0
        encoder = BlockEncoder(rig.spec, bytes(16), None)
        self.digests = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(slots.count)]
        self.heads: list[bytes] = []
        for i, digest in enumerate(self.digests):
            record = encoder.encode(slots.block(i), RecordMeta(digest, None, i, 0, None))
            self.heads.append(bytes(record.buffers[0]))
            encoder.recycle()

    def name(self, i: int) -> bytes:
        return self.lap.to_bytes(16, "little") + b"\1" + self.digests[i]

    def put(self, threads: int) -> float:
        """Store every block under names that are new; from the second lap on into regions written before."""
        self.lap += 1
        each = max(1, min(PUT_RECORDS, PUT_BYTES // self.slots.block_bytes))

        def work(share: range) -> None:
            for start in range(0, len(share), each):
                items = [
                    PutItem(self.name(i), [self.heads[i], self.slots.block(i)]) for i in share[start : start + each]
                ]
                if set(self.backend.put_many(items, Call.within(60))) != {PutStatus.STORED}:
                    raise SystemExit("a put was refused")

        return in_threads(work, self.slots.count, threads)

    def get(self, threads: int, *, verify: bool) -> float:
        head_bytes = len(self.heads[0])

        def work(share: range) -> None:
            decoder = BlockDecoder(self.rig.spec, bytes(16), lambda _: None)

            def place(k: int, info: RecordInfo) -> Sequence[memoryview]:
                del info
                return [self.slots.frame(share[k])[PAGE - head_bytes :]]

            def done(k: int) -> None:
                if verify:
                    decoder.open(self.slots.frame(share[k])[PAGE - head_bytes :], self.digests[share[k]])

            names = [self.name(i) for i in share]
            if set(self.backend.read_many(names, place, done, Call.within(60))) != {ReadStatus.OK}:
                raise SystemExit("a record is missing")

        return in_threads(work, self.slots.count, threads)


def report(what: str, nbytes: int, pairs: Sequence[tuple[float, float]]) -> None:
    raw, ours = min(r for r, _ in pairs), min(o for _, o in pairs)
    ratio = statistics.median(r / o for r, o in pairs)
    print(
        f"  {what:32}{nbytes / ours / 1e9:6.2f} GB/s   raw {nbytes / raw / 1e9:6.2f} GB/s   ratio {ratio:.2f}"
        f"   of the bests {raw / ours:.2f}"
    )


def bench_backend(folder: Path, block_kib: int, args: argparse.Namespace) -> None:
    count = (args.mib << 10) // block_kib
    rig = make_rig(block_kib, 1)
    slots = Slots.make(block_kib << 10, count)
    sample = rig.blocks.view(torch.uint8).view(-1).numpy()
    for i in range(count):
        np.copyto(np.frombuffer(slots.block(i), np.uint8), sample)
    raw = Raw(folder / f"raw-{block_kib}", slots, direct=args.direct)
    ours = Ours(folder / f"ours-{block_kib}", rig, slots, direct=args.direct)
    raw.put(args.threads)
    for _ in range(3):
        ours.put(args.threads)  # laps over every region: first writes into fresh extents are another matter
    print(f"{block_kib} KiB blocks, {count} of them, {args.threads} threads, {ours.backend.describe()['io']}")
    nbytes = slots.block_bytes * count
    puts = [(raw.put(args.threads), ours.put(args.threads)) for _ in range(args.rounds)]
    report("put", nbytes, puts)
    for verify in (False, True):
        gets = [(raw.get(args.threads), ours.get(args.threads, verify=verify)) for _ in range(args.rounds)]
        report("cold get, verified" if verify else "cold get", nbytes, gets)
    raw.close()
    ours.backend.close()


def bench_cache(folder: Path, block_kib: int, args: argparse.Namespace) -> None:
    """The same blocks through KVCache: put to flushed, get, acquire."""
    count = min(128, (args.mib << 10) // block_kib)
    rig = make_rig(block_kib, count)
    slots = Slots.make(block_kib << 10, count)
    raw = Raw(folder / f"cache-raw-{block_kib}", slots, direct=args.direct)
    raw.order = np.arange(count)  # a prompt is read in the order in which it was written, so its baseline is, too
    raw.put(args.threads)
    tier = {
        "backend": "nvme",
        "path": str(folder / f"cache-{block_kib}"),
        "capacity": 4 * rig.nbytes + (64 << 20),
        "codec": "none",
        "admit": "all",
        "queue": 2 * rig.nbytes,
        "deadline": "60s",
        "workers": args.threads,
    }
    l1 = {"capacity": int(rig.nbytes * 1.5) + (16 << 20)}
    print(f"through KVCache: {block_kib} KiB blocks, {count} a call, codec none")
    with KVCache.open({"l1": l1, "l2": [tier]}, spec=rig.spec, namespace=NAMESPACE) as cache:

        def put() -> float:
            cache.clear()
            start = time.perf_counter()
            cache.put(rig.key, rig.blocks)
            cache.flush()
            return time.perf_counter() - start

        for _ in range(4):
            put()
        report("put to flushed", rig.nbytes, [(raw.put(args.threads), put()) for _ in range(args.rounds)])
    with KVCache.open({"l1": {"enabled": False}, "l2": [tier]}, spec=rig.spec, namespace=NAMESPACE) as cache:

        def get() -> float:
            start = time.perf_counter()
            got = cache.get(rig.key, rig.out)
            spent = time.perf_counter() - start
            if got != count:
                raise SystemExit(f"only {got} of {count} blocks")
            return spent

        get()
        report("cold get, L1 off", rig.nbytes, [(raw.get(args.threads), get()) for _ in range(args.rounds)])
    report("cold acquire", rig.nbytes, [(raw.get(args.threads), acquire(l1, tier, rig)) for _ in range(args.rounds)])
    raw.close()


def acquire(l1: dict[str, int], tier: dict[str, object], rig: Rig) -> float:
    """Acquire with an empty L1 whose memory was touched before."""
    config = {"l1": l1, "l2": [tier]}
    with KVCache.open(config, spec=rig.spec, namespace=NAMESPACE) as cache:
        with cache.acquire(rig.key):
            pass
        cache.stats()
    with KVCache.open(config, spec=rig.spec, namespace=NAMESPACE) as cache:
        start = time.perf_counter()
        with cache.acquire(rig.key) as lease:
            spent = time.perf_counter() - start
            if len(lease.tensors) != len(rig.key):
                raise SystemExit(f"only {len(lease.tensors)} of {len(rig.key)} blocks")
    return spent


def bench_lookup(folder: Path, rounds: int) -> None:
    backend = NvmeBackend()
    backend.open(
        BackendContext(tier="bench", options=NvmeOptions(path=str(folder / "lookup")), capacity_bytes=256 << 20)
    )
    names = [hashlib.shake_256(i.to_bytes(8, "little")).digest(49) for i in range(2 * LOOKUPS)]
    for start in range(0, LOOKUPS, 256):
        backend.put_many([PutItem(name, [bytes(8000)]) for name in names[start : start + 256]], Call.within(60))
    for what, asked in (("present", names[:LOOKUPS]), ("absent", names[LOOKUPS:])):
        spent = []
        for _ in range(rounds * 5):
            start_s = time.perf_counter()
            backend.exists_many(asked, Call.within(60))
            spent.append(time.perf_counter() - start_s)
        print(f"  exists, {LOOKUPS} {what}: {min(spent) * 1e3:.2f} ms")
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made; default: a temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--mib", type=int, default=512, help="data of each size, in MiB")
    parser.add_argument("--kib", type=int, nargs="*", default=[64, 512, 2048], help="block sizes, multiples of 64")
    parser.add_argument("--no-direct", dest="direct", action="store_false", help="through the page cache")
    parser.add_argument("--skip-cache", action="store_true", help="the backend alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-nvme-") as name:
        for block_kib in args.kib:
            bench_backend(Path(name), block_kib, args)
        if not args.skip_cache:
            for block_kib in args.kib:
                bench_cache(Path(name), block_kib, args)
        print("lookups")
        bench_lookup(Path(name), args.rounds)


if __name__ == "__main__":
    main()
