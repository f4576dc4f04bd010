"""Public calls of a cache against np.copyto of the same blocks, in one run.

    python benchmarks/bench_cache.py [--block-kib 2048] [--blocks 64] [--rounds 7] [--path DIR]

``copyto`` copies the same blocks into as many destinations, rotating, with one thread.  Every row
is the median over the rounds; rows and baseline alternate, so that a machine whose speed drifts
moves both.  ``lookup`` and digests are of 65,536 tokens in 16-token blocks.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
NAMESPACE = Namespace(model="bench", revision="r1")


@dataclass
class Rig:
    """Blocks, a key for them, and destinations that were touched before."""

    spec: BlockSpec
    blocks: torch.Tensor
    out: torch.Tensor
    key: KVCacheKey

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes


def kv_bytes(nbytes: int) -> np.ndarray:
    """Bytes of real KV (bfloat16 of a small model), repeated; compression needs real exponents."""
    files = sorted(DATA.glob("bf16_*.npy"))
    sample = np.concatenate([np.load(f).reshape(-1).view(np.uint8) for f in files])
    return np.resize(sample, nbytes)


def make_rig(block_kib: int, n_blocks: int) -> Rig:
    spec = BlockSpec(layers=block_kib * 1024 // 65536, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
    blocks = torch.from_numpy(kv_bytes(n_blocks * spec.nbytes)).view(torch.bfloat16).view(n_blocks, *spec.shape)
    key = KVCacheKey.from_tokens(np.arange(16 * n_blocks), block_tokens=16)
    return Rig(spec, blocks, torch.ones_like(blocks), key)


def timed(fn: Callable[[], Any]) -> float:
    started = time.perf_counter()
    fn()
    return time.perf_counter() - started


def copyto(rig: Rig) -> None:
    source = rig.blocks.view(torch.uint8).view(len(rig.key), -1).numpy()
    target = rig.out.view(torch.uint8).view(len(rig.key), -1).numpy()
    for i in range(len(rig.key)):
        np.copyto(target[i], source[i])


def report(name: str, rig: Rig, rounds: int, fn: Callable[[], float]) -> None:
    fn()
    copyto(rig)
    pairs = [(timed(lambda: copyto(rig)), fn()) for _ in range(rounds)]
    base = statistics.median(b for b, _ in pairs)
    took = statistics.median(t for _, t in pairs)
    ratio = statistics.median(b / t for b, t in pairs)
    gb = rig.nbytes / 1e9
    print(f"{name:<34}{gb / took:7.2f} GB/s   copyto {gb / base:6.2f} GB/s   ratio {ratio:5.2f}")


def bench_l1(rig: Rig, rounds: int) -> None:
    capacity = int(rig.nbytes * 1.3) + (16 << 20)
    with KVCache.open({"l1": {"capacity": capacity}}, spec=rig.spec, namespace=NAMESPACE) as cache:

        def put() -> float:
            cache.delete(rig.key)
            return timed(lambda: cache.put(rig.key, rig.blocks))

        rows = rig.out.view(torch.uint8).view(len(rig.key), -1).numpy()

        def acquire() -> None:
            with cache.acquire(rig.key) as lease:
                for row, tensor in zip(rows, lease.tensors, strict=True):
                    np.copyto(row, tensor.view(-1).view(torch.uint8).numpy())

        report("L1 put", rig, rounds, put)
        report("L1 acquire + copy out", rig, rounds, lambda: timed(acquire))
        report("L1 get", rig, rounds, lambda: timed(lambda: cache.get(rig.key, rig.out)))


def bench_tier(rig: Rig, rounds: int, backend: str, path: str, codec: str) -> None:
    """A tier without L1: LMDB is read by the calling thread, NVMe past the page cache by the tier's threads."""
    tier = {"backend": backend, "path": path, "capacity": 4 * rig.nbytes, "codec": codec, "queue": 2 * rig.nbytes}
    config = {"l1": {"enabled": False}, "l2": [{**tier, "admit": "all"}]}
    with KVCache.open(config, spec=rig.spec, namespace=NAMESPACE) as cache:
        started = time.perf_counter()
        cache.put(rig.key, rig.blocks)
        cache.flush()
        seconds = time.perf_counter() - started
        stored = cache.stats().tiers[0].counters
        print(f"{backend} put to flushed, codec {codec:<8}{rig.nbytes / 1e9 / seconds:6.2f} GB/s", end="   ")
        print(f"ratio raw/stored {stored.stored_raw_bytes / max(1, stored.stored_bytes):.3f}")
        report(f"{backend} get, verified, {codec}", rig, rounds, lambda: timed(lambda: cache.get(rig.key, rig.out)))
        got = cache.get(rig.key, rig.out)
        same = torch.equal(rig.out[:got].view(torch.uint8), rig.blocks[:got].view(torch.uint8))
        print(f"  {got} of {len(rig.key)} blocks, bit-identical: {'yes' if same else 'NO'}")


def bench_lookup(rounds: int, path: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 128_000, 65_536)
    spec = BlockSpec(layers=1, kv_heads=1, head_dim=64, block_tokens=16, dtype="bfloat16")
    best = min(timed(lambda: KVCacheKey.from_tokens(tokens, block_tokens=16)) for _ in range(rounds * 3))
    print(f"digests of 65,536 tokens{best * 1e3:20.2f} ms")
    key = KVCacheKey.from_tokens(tokens, block_tokens=16)
    blocks = torch.zeros((len(key), *spec.shape), dtype=torch.bfloat16)
    tier = {"backend": "lmdb", "path": path, "capacity": "1GiB", "codec": "none"}
    with KVCache.open({"l1": {"capacity": "64MiB"}, "l2": [tier]}, spec=spec, namespace=NAMESPACE) as cache:
        cache.put(key, blocks)
        cache.flush()
        best = min(timed(lambda: cache.lookup(key)) for _ in range(rounds * 3))
        print(f"lookup of {cache.lookup(key).blocks} blocks in L1{best * 1e3:15.2f} ms")
    with KVCache.open({"l1": {"enabled": False}, "l2": [tier]}, spec=spec, namespace=NAMESPACE) as cache:
        best = min(timed(lambda: cache.lookup(key)) for _ in range(rounds * 3))
        print(f"lookup of {cache.lookup(key).blocks} blocks in LMDB{best * 1e3:13.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-kib", type=int, default=2048, help="block size in KiB, a multiple of 64 (2048)")
    parser.add_argument("--blocks", type=int, default=64, help="blocks per call (64)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds per row (7)")
    parser.add_argument("--path", help="where stores are made, on a real disk; default: a temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    rig = make_rig(args.block_kib, args.blocks)
    print(f"{args.blocks} blocks of {args.block_kib} KiB")
    bench_l1(rig, args.rounds)
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        for backend, codec in itertools.product(("lmdb", "nvme"), ("none", "planes")):
            bench_tier(rig, args.rounds, backend, str(Path(folder) / f"{backend}-{codec}"), codec)
        bench_lookup(args.rounds, str(Path(folder) / "lookup"))


if __name__ == "__main__":
    main()
