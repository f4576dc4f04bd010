"""What encryption at rest costs: aes-gcm around none and planes, against those alone and np.copyto in the same run.

    python benchmarks/bench_encryption.py [--rounds 7] [--mib 64]

Blocks of 2 MiB and of 64 KiB are put together from the real blocks in tests/data, more of them than
the last-level cache holds.  Encoding counts from the raw block to the finished record with all
checksums, decoding from the record through full verification into the destination.  Speeds are raw
megabytes (1e6) per second: on one thread from each block's best time, on two from the best round;
in a round every variant runs once.
"""

from __future__ import annotations

import argparse
import platform
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvstore_aesgcm.gcm_codec import AesGcmCodec
from kvstore_aesgcm.options import AesGcmOptions

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import Codec, CodecContext
from kvstore.plugins import Registry
from kvstore.record import RecordMeta
from kvstore.spec import BlockSpec

DATA = Path(__file__).parents[1] / "tests" / "data"
NAMESPACE, DIGEST = bytes(16), bytes(32)
SIZES = {"2 MiB": BlockSpec(32, 16, 64, 16, "bfloat16"), "64 KiB": BlockSpec(4, 4, 64, 16, "bfloat16")}
VARIANTS = ("none", "aes-gcm, inner none", "planes", "aes-gcm, inner planes")
KEY = secrets.token_bytes(32)

Array = npt.NDArray[Any]


def key() -> bytes:
    """Source of the key."""
    return KEY


def real_blocks(spec: BlockSpec, count: int) -> Array:
    """``count`` blocks in LCND of heads drawn from real blocks."""
    real = [np.load(path) for path in sorted(DATA.glob("bf16_*_16tok_*.npy"))]
    heads = np.concatenate([a.transpose(0, 3, 1, 2, 4).reshape(-1, 2, 16, 64) for a in real])
    picks = np.random.default_rng(7).integers(0, len(heads), (count, spec.layers, spec.kv_heads))
    return np.ascontiguousarray(heads[picks].transpose(0, 1, 3, 4, 2, 5)).reshape(count, -1)


def codec_of(variant: str) -> Codec:
    registry = Registry.discover()
    if not variant.startswith("aes-gcm"):
        return registry.create_codec(variant)
    options = AesGcmOptions(keys=(f"call:{__name__}:key",), inner=variant.rpartition(" ")[2])
    return AesGcmCodec(CodecContext(options, registry.find_codec))


class Bench:
    """One variant on one size of block, on one thread."""

    def __init__(self, variant: str, spec: BlockSpec, blocks: Array) -> None:
        codec = codec_of(variant)
        self._encoder = BlockEncoder(spec, NAMESPACE, codec)
        self._decoder = BlockDecoder(spec, NAMESPACE, lambda _: codec)
        self._raw = [memoryview(block).cast("B").toreadonly() for block in blocks]
        self._records = [memoryview(self._record(raw)) for raw in self._raw]
        self._out = memoryview(np.empty_like(blocks[0])).cast("B")
        self.stored = sum(map(len, self._records)) / blocks.nbytes
        for raw, record in zip(self._raw, self._records, strict=True):
            self._decoder.open(record, DIGEST).write_into(self._out)
            if self._out != raw:
                raise SystemExit(f"{variant}: a block came back different")

    def _record(self, raw: memoryview) -> bytes:
        record = b"".join(self._encoder.encode(raw, RecordMeta(DIGEST)).buffers)
        self._encoder.recycle()
        return record

    def encode(self) -> Array:
        """Seconds for each block."""
        times = [time.perf_counter()]
        for raw in self._raw:
            self._encoder.encode(raw, RecordMeta(DIGEST))
            self._encoder.recycle()
            times.append(time.perf_counter())
        return np.diff(times)

    def decode(self) -> Array:
        """Seconds for each block."""
        times = [time.perf_counter()]
        for record in self._records:
            self._decoder.open(record, DIGEST).write_into(self._out)
            self._decoder.recycle()
            times.append(time.perf_counter())
        return np.diff(times)


def copy(blocks: Array, out: Array) -> Array:
    """Seconds for each block."""
    times = [time.perf_counter()]
    for block in blocks:
        np.copyto(out, block)
        times.append(time.perf_counter())
    return np.diff(times)


def seconds(*steps: Callable[[], object]) -> float:
    """Wall time until all steps are done, each on a thread of its own."""
    threads = [threading.Thread(target=step) for step in steps]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def measure(spec: BlockSpec, mib: int, rounds: int) -> None:
    count = max(4, (mib << 20) // spec.nbytes)
    blocks = real_blocks(spec, count)
    half = count // 2
    pairs = {v: (Bench(v, spec, blocks[:half]), Bench(v, spec, blocks[half : 2 * half])) for v in VARIANTS}
    out = np.empty_like(blocks[0])
    copied: list[Array] = []
    alone: dict[tuple[str, str], list[Array]] = {}
    together: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        copied.append(copy(blocks[:half], out))
        for variant, (a, b) in pairs.items():
            for what in ("encode", "decode"):
                alone.setdefault((variant, what), []).append(getattr(a, what)())
                together.setdefault((variant, what), []).append(seconds(getattr(a, what), getattr(b, what)))
    report(spec, np.min(copied, axis=0).mean(), pairs, alone, together)


def report(
    spec: BlockSpec,
    copied: float,
    pairs: dict[str, tuple[Bench, Bench]],
    alone: dict[tuple[str, str], list[Array]],
    together: dict[tuple[str, str], list[float]],
) -> None:
    best = {place: float(np.min(times, axis=0).mean()) for place, times in alone.items()}
    two = {place: min(times) / (2 * len(alone[place][0])) for place, times in together.items()}
    columns = [f"{what} {unit}" for what in ("encode", "decode") for unit in ("MB/s", "/ copy", "/ inner", "2 threads")]
    print(f"\nnp.copyto {spec.nbytes / copied / 1e6:,.0f} MB/s")
    print("| blocks | codec | ratio | " + " | ".join(columns) + " |")
    print("|---|---|" + "---:|" * 9)
    size = next(name for name, one in SIZES.items() if one == spec)
    for variant in VARIANTS:
        cells = [size, f"`{variant}`", f"{1 / pairs[variant][0].stored:.3f}"]
        for what in ("encode", "decode"):
            one, inner = best[variant, what], best[variant.rpartition(" ")[2], what]
            cells += [f"{spec.nbytes / one / 1e6:,.0f}", f"{copied / one:.2f}", f"{inner / one:.2f}"]
            cells.append(f"{spec.nbytes / two[variant, what] / 1e6:,.0f}")
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=64, help="of blocks for each size")
    args = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}")
    for spec in SIZES.values():
        measure(spec, args.mib, args.rounds)


if __name__ == "__main__":
    main()
