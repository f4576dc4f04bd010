"""Ratio and speed of the codecs on real KV blocks, cold, against np.copyto in the same run.

    python benchmarks/bench_codecs.py [--rounds 5] [--blocks 48]

Blocks of 2 MiB are put together from the heads of the real blocks in tests/data, never twice the
same head in a segment, and there are more of them than fit the last-level cache.  Encoding counts
from the raw block to the finished record with all checksums, decoding from the record through full
verification into the destination.  Speeds are raw gigabytes (1e9) per second, best of all rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvstore_zstd.planes import PlanesCodec
from kvstore_zstd.planes_base import PlanesBaseCodec
from kvstore_zstd.zstd_codec import ZstdCodec

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import Codec
from kvstore.none_codec import NoneCodec
from kvstore.record import RecordMeta
from kvstore.spec import BlockSpec

DATA = Path(__file__).parents[1] / "tests" / "data"
NAMESPACE = bytes(16)
DIGEST = bytes(32)
CODECS: dict[str, Callable[[], Codec]] = {
    "none": NoneCodec,
    "zstd": ZstdCodec,
    "planes": PlanesCodec,
    "planes-base": PlanesBaseCodec,
}
BY_ID = {0: NoneCodec, 1: ZstdCodec, 2: PlanesCodec, 3: PlanesBaseCodec}

Array = npt.NDArray[Any]
Step = Callable[[int], None]


def real_blocks(pattern: str) -> list[Array]:
    return [np.load(path) for path in sorted(DATA.glob(pattern))]


def spec_of(block: Array, dtype: str) -> BlockSpec:
    layers, _, tokens, heads, head_dim = block.shape
    return BlockSpec(layers, heads, head_dim, tokens, dtype)


def large_blocks(pattern: str, n_blocks: int) -> list[Array]:
    """Blocks of 2 MiB in LCND, shape (layers, 2, 16, 16, 64), of heads drawn from real blocks."""
    heads = np.concatenate([a.transpose(0, 3, 1, 2, 4).reshape(-1, 2, 16, 64) for a in real_blocks(pattern)])
    rng = np.random.default_rng(7)
    n_layers = (2 << 20) // (2 * 16 * 16 * 64 * heads.itemsize)
    blocks = []
    for _ in range(n_blocks):
        picks = np.stack([rng.permutation(len(heads))[:64] for _ in range(n_layers // 4)]).reshape(n_layers, 16)
        blocks.append(np.ascontiguousarray(heads[picks].transpose(0, 2, 3, 1, 4)))
    return blocks


def seconds_per_round(steps: Sequence[Step], n_blocks: int, rounds: int) -> float:
    """Best wall time in which each step, on a thread of its own, has seen its share of the blocks."""
    best = float("inf")
    for _ in range(rounds):
        barrier = threading.Barrier(len(steps) + 1)

        def work(first: int, step: Step, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            for index in range(first, n_blocks, len(steps)):
                step(index)
            barrier.wait()

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(steps)]
        for thread in threads:
            thread.start()
        barrier.wait()
        begin = time.perf_counter()
        barrier.wait()
        best = min(best, time.perf_counter() - begin)
        for thread in threads:
            thread.join()
    return best


class Bench:
    """One kind of data in memory: blocks, destinations, and the speed of a plain copy of them."""

    def __init__(self, pattern: str, dtype: str, args: argparse.Namespace) -> None:
        self.blocks = large_blocks(pattern, args.blocks)
        self.real = real_blocks(pattern)
        self.dtype = dtype
        self.rounds: int = args.rounds
        self.out = [np.zeros_like(block) for block in self.blocks]
        self.copy = [self.speed([self.copy_step] * n) for n in (1, 2)]

    def speed(self, steps: Sequence[Step]) -> float:
        nbytes = sum(block.nbytes for block in self.blocks)
        return nbytes / seconds_per_round(steps, len(self.blocks), self.rounds) / 1e9

    def copy_step(self, index: int) -> None:
        np.copyto(self.out[index], self.blocks[index])

    def ratio(self, make: Callable[[], Codec]) -> float:
        """Raw over stored bytes of the blocks in tests/data together, heads of records included."""
        raw = stored = 0
        for block in self.real:
            encoder = BlockEncoder(spec_of(block, self.dtype), NAMESPACE, make())
            raw += block.nbytes
            stored += encoder.encode(block.data.cast("B"), RecordMeta(DIGEST)).nbytes
        return raw / stored

    def row(self, name: str) -> None:
        make = CODECS[name]
        spec = spec_of(self.blocks[0], self.dtype)
        encoder = BlockEncoder(spec, NAMESPACE, make())
        raws = [block.data.cast("B") for block in self.blocks]
        records = [memoryview(b"".join(encoder.encode(raw, RecordMeta(DIGEST)).buffers)) for raw in raws]

        def encode_step() -> Step:
            encoder = BlockEncoder(spec, NAMESPACE, make())

            def step(index: int) -> None:
                encoder.encode(raws[index], RecordMeta(DIGEST))
                encoder.recycle()

            return step

        def decode_step() -> Step:
            decoder = BlockDecoder(spec, NAMESPACE, lambda codec_id: BY_ID[codec_id]())

            def step(index: int) -> None:
                decoder.open(records[index], DIGEST).write_into(self.out[index].data.cast("B"))

            return step

        speeds = [self.speed([step() for _ in range(n)]) for step in (encode_step, decode_step) for n in (1, 2)]
        if any(a.tobytes() != b.tobytes() for a, b in zip(self.out, self.blocks, strict=True)):
            raise SystemExit(f"{name}: decoded blocks differ")
        cells = [f"{s:5.2f} ({s / c:4.2f})" for s, c in zip(speeds, self.copy * 2, strict=True)]
        print(f"{self.dtype:14} {name:12} {self.ratio(make):6.3f}   " + "   ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="best of how many rounds")
    parser.add_argument("--blocks", type=int, default=48, help="blocks of 2 MiB")
    args = parser.parse_args()
    print(f"python {platform.python_version()}, {os.cpu_count()} cores; GB/s raw, (ratio to np.copyto)")
    print(f"{'dtype':14} {'codec':12} {'ratio':>6}   encode 1 thread  2 threads     decode 1 thread  2 threads")
    data = (
        ("bf16*.npy", "bfloat16", ("none", "zstd", "planes", "planes-base")),
        ("fp8e4m3*LCND.npy", "float8_e4m3fn", ("none", "zstd")),
        ("int8*LCND.npy", "int8", ("none", "zstd")),
    )
    for pattern, dtype, names in data:
        bench = Bench(pattern, dtype, args)
        one, two = bench.copy
        print(f"{dtype:14} np.copyto    {'':6}   1 thread {one:.2f}, 2 threads {two:.2f}")
        for name in names:
            bench.row(name)


if __name__ == "__main__":
    main()
