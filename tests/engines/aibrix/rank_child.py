"""One rank of two: ``python -m tests.engines.aibrix.rank_child LIBRARY RANK FILE``; prints what each call gave.

``LIBRARY`` is ``theirs`` or ``ours``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from kvstore import Namespace
from kvstore.compat import aibrix
from tests.engines.aibrix.pair import BLOCK_TOKENS, Side, library, plain, raw


def answers(side: Side, rank: int, kind: str) -> list[Any]:
    """Rank 0 stores five blocks of a prompt, rank 1 three and another prompt; both ask for all of it."""
    values: list[Any] = list(range(32)) if kind == "tokens" else [f"h{i}" for i in range(8)]
    other: list[Any] = list(range(100, 116)) if kind == "tokens" else [f"g{i}" for i in range(4)]
    query, lonely = side.ids(kind, values), side.ids(kind, other)
    stored = query[: (3 if rank else 5) * BLOCK_TOKENS]
    got = [side.put(None, stored, [(rank, block) for block in range(len(stored) // BLOCK_TOKENS)])]
    if rank:
        got.append(side.put(None, lonely, range(4)))
    memory = torch.full((8, *side.cache.block_shape), -1, dtype=side.cache.block_dtype)
    blocks, places = [memory[i : i + 1] for i in range(8)], [(i, 0) for i in range(8)]
    handle = side.package.MemoryRegionKVCacheHandle.create(blocks, side.cache.block_spec, places)
    got += [
        side.cache.acquire(None, query),
        side.cache.acquire(query[:8], query[8:]),
        side.cache.acquire(None, lonely),
        side.cache.get(None, query, handle),
        raw(memory[:3]).hex(),
        side.cache.exists(None, query),
        side.cache.exists(None, lonely),
        side.cache.delete(None, query[8:12]),
        side.cache.acquire(None, query),
    ]
    return got


def main(name: str, rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    aibrix.configure(namespace=Namespace(model="m", revision="r"))
    package, spec = library() if name == "theirs" else (aibrix, aibrix)
    side = Side(name, package, spec, {"heads": [2 * rank, 2 * rank + 1]})
    side.open()
    own = side.cache
    side.cache = package.GroupAwareKVCacheManager(own.config, dist.group.WORLD)
    own.close()
    told = [plain(answer) for kind in ("tokens", "hashes") for answer in answers(side, rank, kind)]
    print("ANSWERS " + json.dumps(told, default=lambda value: value.hex()))
    side.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
