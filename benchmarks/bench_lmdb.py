"""LMDB backend beside what bounds it: raw lmdb puts, np.copyto, and single lookups.

Run it with ``python benchmarks/bench_lmdb.py [--dir DIR] [--rounds N]``.  Every figure is the best
of several interleaved rounds; on a shared machine trust the ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import numpy as np
import xxhash
from kvstore_lmdb.backend import LmdbBackend
from kvstore_lmdb.options import LmdbOptions

from kvstore.backend import BackendContext, PutItem
from kvstore.types import Call, PutStatus, ReadStatus

TOTAL_BYTES = 192 << 20
SEGMENT_BYTES = 256 << 10
CALL_RECORDS = 64


@dataclass
class Blocks:
    """Records of one size: a head, a payload and the name of each."""

    payload_bytes: int
    heads: list[bytes] = field(default_factory=list)
    payloads: list[np.ndarray] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)

    @classmethod
    def make(cls, payload_bytes: int) -> Blocks:
        made = cls(payload_bytes)
        noise = np.random.default_rng(0).integers(0, 256, (TOTAL_BYTES // payload_bytes, payload_bytes), np.uint8)
        segments = -(-payload_bytes // SEGMENT_BYTES)
        for i, row in enumerate(noise):
            made.heads.append(bytes(192 + 16 * segments))
            made.payloads.append(row)
            made.names.append(hashlib.shake_256(i.to_bytes(8, "little")).digest(49))
        return made

    @property
    def nbytes(self) -> int:
        return self.payload_bytes * len(self.payloads)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def opened(path: Path, capacity_bytes: int = 8 << 30) -> LmdbBackend:
    backend = LmdbBackend()
    backend.open(BackendContext(tier="bench", options=LmdbOptions(path=str(path)), capacity_bytes=capacity_bytes))
    return backend


def put_ours(path: Path, blocks: Blocks) -> float:
    backend = opened(path)
    items = [
        PutItem(name, [head, payload.data])
        for name, head, payload in zip(blocks.names, blocks.heads, blocks.payloads, strict=True)
    ]

    def work() -> None:
        for start in range(0, len(items), CALL_RECORDS):
            statuses = backend.put_many(items[start : start + CALL_RECORDS], Call.within(60))
            if set(statuses) != {PutStatus.STORED}:
                raise SystemExit(f"puts were refused: {statuses}")

    spent = seconds(work)
    backend.close()
    return spent


def put_raw(path: Path, blocks: Blocks) -> float:
    """The same bytes, the same mode, the same records a transaction, and nothing else."""
    records = [head + payload.tobytes() for head, payload in zip(blocks.heads, blocks.payloads, strict=True)]
    each = max(1, min(32, (4 << 20) // len(records[0])))
    with lmdb.open(str(path), map_size=64 << 30, sync=False, metasync=False) as env:

        def work() -> None:
            for start in range(0, len(records), each):
                with env.begin(write=True) as txn:
                    for name, record in zip(
                        blocks.names[start : start + each], records[start : start + each], strict=True
                    ):
                        txn.put(name, record)

        spent = seconds(work)
        env.sync(True)  # noqa: FBT003 - ours is synced by its close: neither writes into the other's dirty pages
        return spent


def get_ours(backend: LmdbBackend, blocks: Blocks, out: np.ndarray, *, verify: bool) -> float:
    head_bytes = len(blocks.heads[0])

    def receive(i: int, view: memoryview) -> None:
        np.copyto(out[i], np.frombuffer(view, np.uint8, offset=head_bytes))

    def receive_verified(i: int, view: memoryview) -> None:
        source, target = np.frombuffer(view, np.uint8, offset=head_bytes), out[i]
        for start in range(0, len(source), SEGMENT_BYTES):
            part = target[start : start + SEGMENT_BYTES]
            np.copyto(part, source[start : start + SEGMENT_BYTES])
            xxhash.xxh3_64_intdigest(part)

    take = receive_verified if verify else receive

    def work() -> None:
        for start in range(0, len(blocks.names), CALL_RECORDS):
            some = blocks.names[start : start + CALL_RECORDS]
            if set(backend.get_many(some, take, Call.within(60))) != {ReadStatus.OK}:
                raise SystemExit("a record is missing")

    return seconds(work)


def copy(blocks: Blocks, out: np.ndarray) -> float:
    def work() -> None:
        for i, payload in enumerate(blocks.payloads):
            np.copyto(out[i % len(out)], payload)

    return seconds(work)


def bench_size(folder: Path, payload_bytes: int, rounds: int) -> None:
    blocks = Blocks.make(payload_bytes)
    out = np.zeros((min(CALL_RECORDS, len(blocks.payloads)), payload_bytes), np.uint8)
    times: dict[str, list[float]] = {}

    def note(what: str, spent: float) -> None:
        times.setdefault(what, []).append(spent)

    for _ in range(rounds):
        shutil.rmtree(folder / "raw", ignore_errors=True)
        shutil.rmtree(folder / "ours", ignore_errors=True)
        note("raw lmdb put", put_raw(folder / "raw", blocks))
        note("put", put_ours(folder / "ours", blocks))
        backend = opened(folder / "ours")
        for _ in range(3):
            note("np.copyto", copy(blocks, out))
            note("get", get_ours(backend, blocks, out, verify=False))
            note("get + xxh3", get_ours(backend, blocks, out, verify=True))
        backend.close()
    speed = {what: blocks.nbytes / min(spent) / 1e9 for what, spent in times.items()}
    print(f"{payload_bytes >> 10} KiB records, {len(blocks.payloads)} of them, {CALL_RECORDS} a call")
    for what, against in [("put", "raw lmdb put"), ("get", "np.copyto"), ("get + xxh3", "np.copyto")]:
        ratio = speed[what] / speed[against]
        print(f"  {what:12} {speed[what]:6.2f} GB/s   {against:12} {speed[against]:6.2f} GB/s   ratio {ratio:.2f}")


def bench_lookup(folder: Path, rounds: int) -> None:
    names = [hashlib.shake_256(i.to_bytes(8, "little")).digest(49) for i in range(8192)]
    backend = opened(folder / "lookup")
    items = [PutItem(name, [bytes(192), bytes(8000)]) for name in names[:4096]]
    backend.put_many(items, Call.within(60))
    leading = Call.within(600, leading_only=True)
    for what, asked, call in [
        ("4,096 present", names[:4096], Call.within(600)),
        ("4,096 absent", names[4096:], Call.within(600)),
        ("first of 4,096 absent, leading only", names[4096:], leading),
    ]:
        best = min(seconds(lambda a=asked, c=call: backend.exists_many(a, c)) for _ in range(rounds * 5))  # type: ignore[misc]
        print(f"  exists, {what}: {best * 1e3:.2f} ms")
    best = min(seconds(lambda: backend.epoch(b"n" * 16)) for _ in range(rounds * 50))
    print(f"  epoch: {best * 1e6:.1f} us")
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=None, help="where to put the stores; default: a temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-lmdb-") as name:
        for payload_bytes in (64 << 10, 2 << 20):
            bench_size(Path(name), payload_bytes, args.rounds)
        print("lookups")
        bench_lookup(Path(name), args.rounds)


if __name__ == "__main__":
    main()
