"""``exists`` of a long prompt: AIBrix KVCache beside kvstore.compat.aibrix, same calls, one process.

    python benchmarks/engines/bench_aibrix_exists.py [--tokens 65536] [--rounds 5]

Needs the package aibrix-kvcache (made for 0.8.0) and no accelerator.  Both keep the prompt in
memory, without a second tier.  Both kinds of keys are asked

* with a new key object, as an engine has for a new request, and again with the same object;
* when all blocks are stored, when the first half is, and when none is.

Every figure is the best of the rounds; the two take turns.  A new AIBrix key of tokens compares
every prefix token by token in Python, which takes tens of seconds: it is asked once.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BLOCK_TOKENS = 16
SETTINGS = {
    "DEVICE": "cpu:0",  # any name but "cpu": AIBrix pins the memory of "cpu", which needs CUDA
    "L1_CACHE_CAPACITY_GB": "0.25",
    "TIME_MEASUREMENT_ENABLED": "0",
}


@dataclass
class Side:
    """One of the two libraries, with an open cache."""

    name: str
    library: Any
    cache: Any
    best_s: dict[str, float] = field(default_factory=dict)

    def ask(self, row: str, query: Any, stored: int) -> None:
        """Time one call and check its answer."""
        started = time.perf_counter()
        status = self.cache.exists(None, query)
        self.best_s[row] = min(self.best_s.get(row, float("inf")), time.perf_counter() - started)
        found = status.value if status.is_ok() else 0
        if found != stored:
            raise SystemExit(f"{self.name} found {found} tokens of {stored}: {status}")


def open_side(name: str, library: Any, spec: Any, n_tokens: int) -> Side:
    import torch

    layout, tensor = spec.KVCacheBlockLayout.NCLD, spec.KVCacheTensorSpec(heads=[0, 1], layers=[0, 1], head_size=8)
    block = spec.KVCacheBlockSpec(BLOCK_TOKENS, torch.bfloat16, layout, tensor)
    return Side(name, library, library.BaseKVCacheManager(library.KVCacheConfig(block, spec.ModelSpec(n_tokens))))


def keys(kind: str, n_tokens: int) -> Callable[[Any], Any]:
    """Make a function that makes a new key object of a library, always of the same prompt."""
    tokens = [i * 7 % 128_000 for i in range(n_tokens)]
    if kind == "tokens":
        return lambda library: library.TokenListView(tokens)
    hashes, chained = [], b""
    for start in range(0, n_tokens, BLOCK_TOKENS):
        chained = hashlib.sha256(chained + repr(tokens[start : start + BLOCK_TOKENS]).encode()).digest()
        hashes.append(chained.hex())
    return lambda library: library.BlockHashes(list(hashes), BLOCK_TOKENS)


def store(side: Side, query: Any, n_tokens: int) -> None:
    chunk = 256 * BLOCK_TOKENS
    for start in range(0, n_tokens, chunk):
        prefix, part = query[:start], query[start : min(start + chunk, n_tokens)]
        handle = side.cache.allocate_for(prefix, part).get()
        status = side.cache.put(prefix, part, handle)
        if not status.is_ok() or status.value != len(part):
            raise SystemExit(f"{side.name} did not store the prompt: {status}")


def measure(sides: list[Side], kind: str, n_tokens: int, rounds: int) -> None:
    make = keys(kind, n_tokens)
    for share, stored in (("none", 0), ("half", n_tokens // 2), ("all", n_tokens)):
        kept = {side.name: make(side.library) for side in sides}
        row = f"{kind:6s} {share:4s} stored"
        for side in sides:
            store(side, kept[side.name], stored)
        for turn in range(rounds):
            for side in sides:
                side.ask(f"{row}, same key", kept[side.name], stored)
                if turn == 0 or (side.name, kind) != ("AIBrix", "tokens"):
                    side.ask(f"{row}, new key", make(side.library), stored)
        for side in sides:
            side.cache.delete(None, kept[side.name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.update({f"AIBRIX_KV_CACHE_OL_{name}": value for name, value in SETTINGS.items()})
    logging.disable(logging.WARNING)

    import aibrix_kvcache
    import aibrix_kvcache.spec

    import kvstore
    from kvstore.compat import aibrix as ours

    ours.configure(namespace=kvstore.Namespace(model="bench", revision="r1"))
    sides = [
        open_side("AIBrix", aibrix_kvcache, aibrix_kvcache.spec, options.tokens),
        open_side("kvstore", ours, ours, options.tokens),
    ]
    print(
        f"exists of {options.tokens} tokens in blocks of {BLOCK_TOKENS}; Python {platform.python_version()}, ", end=""
    )
    print(f"{os.cpu_count()} cores, aibrix-kvcache {aibrix_kvcache.__version__}, best of {options.rounds}")
    for kind in ("hashes", "tokens"):
        measure(sides, kind, options.tokens, options.rounds)
    print(f"{'':32s}{'AIBrix ms':>12s}{'kvstore ms':>12s}{'ratio':>10s}")
    theirs, own = sides
    for row, seconds in theirs.best_s.items():
        print(f"{row:32s}{seconds * 1e3:12.3f}{own.best_s[row] * 1e3:12.3f}{seconds / own.best_s[row]:10.1f}")
    for side in sides:
        side.cache.close()


if __name__ == "__main__":
    main()
