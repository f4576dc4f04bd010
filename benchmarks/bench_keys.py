"""Time to make keys, per container and kind, against hashing the same bytes in one piece.

    python benchmarks/bench_keys.py [--tokens 65536 131072] [--block-tokens 16] [--rounds 30]

Each number is the best of its rounds; the rounds of all measurements take turns, so that a noisy
neighbour hits them alike.  The floor is one SHA-256 per block of the same size and number,
unchained and with nothing around it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kvstore.keys import KVCacheKey
from kvstore.keys.chains import sglang_page_hashes, vllm_block_hashes


def best_of(rounds: int, measurements: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of the best round of each measurement; the rounds take turns."""
    best = dict.fromkeys(measurements, float("inf"))
    for _ in range(rounds):
        for name, run in measurements.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def measurements_of(n_tokens: int, block_tokens: int) -> dict[str, Callable[[], object]]:
    """What is measured for one length, by name."""
    array = np.random.default_rng(0).integers(0, 150_000, n_tokens)
    ids = array.tolist()
    tensor = torch.from_numpy(array)
    hashes = [os.urandom(32) for _ in range(n_tokens // block_tokens)]
    hexes = [h.hex() for h in hashes]
    key = KVCacheKey.from_tokens(array, block_tokens=block_tokens)
    message = bytes(48 + 4 * block_tokens)  # tag, digest before, ids

    def tokens(query: object) -> Callable[[], object]:
        return lambda: KVCacheKey.from_tokens(query, block_tokens=block_tokens)  # type: ignore[arg-type]

    def engine(query: list[bytes] | list[str], *, chained: bool) -> Callable[[], object]:
        return lambda: KVCacheKey.from_block_hashes(query, block_tokens=block_tokens, chained=chained)

    return {
        "floor: bare SHA-256 per block": lambda: [hashlib.sha256(message).digest() for _ in hashes],
        "from_tokens, numpy int64": tokens(array),
        "from_tokens, torch int64": tokens(tensor),
        "from_tokens, list": tokens(ids),
        "from_tokens, range": tokens(range(n_tokens)),
        "from_tokens, one more block": lambda: KVCacheKey.from_tokens(
            ids[:block_tokens], block_tokens=block_tokens, prefix=key
        ),
        "from_block_hashes, bytes, chained=True": engine(hashes, chained=True),
        "from_block_hashes, str, chained=True": engine(hexes, chained=True),
        "from_block_hashes, bytes, chained=False": engine(hashes, chained=False),
        "split in the middle": lambda: key.split(len(key) // 2),
        "coarsen(16)": lambda: key.coarsen(16),
        "vllm_block_hashes, list": lambda: vllm_block_hashes(ids, block_tokens),
        "sglang_page_hashes, list": lambda: sglang_page_hashes(ids, block_tokens),
    }


def machine() -> str:
    """Processor, versions and load, on one line."""
    cpu = next(
        (
            x.split(":", 1)[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if x.startswith("model name")
        ),
        platform.processor(),
    )
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{cpu}, {os.cpu_count()} cores, load {load}; Python {sys.version.split()[0]}, {ssl.OPENSSL_VERSION}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to make keys.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 131_072], help="lengths in tokens")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens per block (default 16)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds; the best counts (default 30)")
    options = parser.parse_args()

    print(machine())
    for n_tokens in options.tokens:
        best = best_of(options.rounds, measurements_of(n_tokens, options.block_tokens))
        floor = best["floor: bare SHA-256 per block"]
        n_blocks = n_tokens // options.block_tokens
        print(f"\n{n_tokens:,} tokens, {n_blocks:,} blocks of {options.block_tokens}")
        print(f"{'':42}{'ms':>9}{'µs/block':>10}{'x floor':>9}")
        for name, ms in best.items():
            print(f"{name:42}{ms:9.3f}{ms * 1e3 / n_blocks:10.3f}{ms / floor:9.2f}")


if __name__ == "__main__":
    main()
