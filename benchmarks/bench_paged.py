"""Paged layers through the cache against dense tensors and a bare indexed copy of the same bytes.

    python benchmarks/bench_paged.py [--mib 64] [--rounds 7] [--device cpu]

Each row is one page size and layer count.  "bare" is one index_select (for a put) or index_copy_ (for
a get) per layer, which moves the bytes once and stores nothing; "dense" is the cache with one stacked
tensor.  Ratios are of speed, so 1.00 is as fast; each measurement is the best of its rounds, and the
rounds of all measurements take turns.  L1 is warm and full: a put evicts.  LMDB is read past L1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace, PagedBlocks

SHAPES = [(4 << 10, 2), (4 << 10, 30), (4 << 10, 60), (16 << 10, 32), (32 << 10, 32), (128 << 10, 32)]
BLOCK_TOKENS = 16
Measurement = Callable[[int], None]
_NAMES = Namespace(model="bench", revision="r")


def best_of(
    rounds: int, measurements: dict[str, Callable[[int], None]], settle: Callable[[], None]
) -> dict[str, float]:
    """Seconds of the best round of each measurement; the rounds take turns."""
    best = dict.fromkeys(measurements, float("inf"))
    for i in range(rounds):
        for name, run in measurements.items():
            settle()
            begin = time.perf_counter()
            run(i)
            settle()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


class Bench:
    """Pages in random order, the same blocks stacked, and caches that hold them."""

    def __init__(self, page_bytes: int, n_layers: int, total_bytes: int, device: str) -> None:
        self.spec = BlockSpec.opaque(page_bytes * n_layers, block_tokens=BLOCK_TOKENS, tag="bench")
        self.n_blocks = max(8, min(512, total_bytes // self.spec.nbytes))
        shape = (2 * self.n_blocks, page_bytes)
        self.layers = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(n_layers)]
        self.ids = torch.randperm(2 * self.n_blocks)[: self.n_blocks]
        self.near_ids = self.ids.to(device)
        self.words = [layer.view(torch.int64) for layer in self.layers]
        self.stacked = torch.stack([layer[self.near_ids] for layer in self.layers], 1).flatten(1)
        self.parts = [part.contiguous().view(torch.int64) for part in self.stacked.split(page_bytes, 1)]  # type: ignore[no-untyped-call]
        self.paged = PagedBlocks(self.layers, self.ids)
        self.device = device
        self._numbers = iter(range(1 << 30))

    def key(self) -> KVCacheKey:
        """A key that no put has used."""
        seed = next(self._numbers)
        hashes = [seed.to_bytes(16, "big") + i.to_bytes(16, "big") for i in range(self.n_blocks)]
        return KVCacheKey.from_block_hashes(hashes, block_tokens=BLOCK_TOKENS, chained=True)

    def settle(self) -> None:
        """Wait for the device, so that its work is measured too."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def bare_gather(self, _: int) -> None:
        self.gathered = [words.index_select(0, self.near_ids) for words in self.words]

    def bare_scatter(self, _: int) -> None:
        for words, part in zip(self.words, self.parts, strict=True):
            words.index_copy_(0, self.near_ids, part)

    def l1(self, rounds: int) -> dict[str, float]:
        """Put and get through L1."""
        slot_bytes = 4096 + -(-self.spec.nbytes // 4096) * 4096
        config: dict[str, Any] = {"l1": {"capacity": self.n_blocks * slot_bytes, "device": "cpu"}}
        with KVCache.open(config, spec=self.spec, namespace=_NAMES) as cache:
            cache.put(self.key(), self.stacked)
            last = [self.key()]

            def put(blocks: Any) -> None:
                last[0] = self.key()
                cache.put(last[0], blocks)

            return best_of(
                rounds,
                {
                    "bare gather": self.bare_gather,
                    "put dense": lambda _: put(self.stacked),
                    "put paged": lambda _: put(self.paged),
                    "bare scatter": self.bare_scatter,
                    "get dense": lambda _: _all(cache.get(last[0], self.stacked), self.n_blocks),
                    "get paged": lambda _: _all(cache.get(last[0], self.paged), self.n_blocks),
                },
                self.settle,
            )

    def lmdb(self, rounds: int) -> dict[str, float]:
        """Get from LMDB, without L1."""
        with tempfile.TemporaryDirectory() as folder:
            tier = {"backend": "lmdb", "path": folder, "capacity": 4 * self.n_blocks * self.spec.nbytes + (64 << 20)}
            config = {"l1": {"enabled": False}, "l2": [tier | {"codec": "none", "queue": 1 << 30}]}
            with KVCache.open(config, spec=self.spec, namespace=_NAMES) as cache:
                key = self.key()
                cache.put(key, self.paged)
                cache.flush()
                return best_of(
                    rounds,
                    {
                        "lmdb dense": lambda _: _all(cache.get(key, self.stacked), self.n_blocks),
                        "lmdb paged": lambda _: _all(cache.get(key, self.paged), self.n_blocks),
                    },
                    self.settle,
                )


def _all(got: int, wanted: int) -> None:
    if got != wanted:
        msg = f"{got} of {wanted} blocks were delivered"
        raise RuntimeError(msg)


def rows(args: argparse.Namespace) -> Iterator[str]:
    for page_bytes, n_layers in SHAPES:
        bench = Bench(page_bytes, n_layers, args.mib << 20, args.device)
        seconds = bench.l1(args.rounds) | bench.lmdb(args.rounds)
        gb = bench.n_blocks * bench.spec.nbytes / 1e9
        against = {
            "put paged": ("bare gather", "put dense"),
            "get paged": ("bare scatter", "get dense"),
            "lmdb paged": ("bare scatter", "lmdb dense"),
        }
        cells = [
            f"{gb / seconds[name]:6.2f} {seconds[bare] / seconds[name]:5.2f} {seconds[dense] / seconds[name]:5.2f}"
            for name, (bare, dense) in against.items()
        ]
        yield f"{page_bytes >> 10:4d} KiB x {n_layers:2d} {bench.n_blocks:5d} | " + " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print("page and layers, blocks | GB/s, ratio to bare, to dense: put (L1) | get (L1) | get (LMDB, no L1)")
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
