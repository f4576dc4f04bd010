"""Three tiers: host memory, LMDB, and segment files on an NVMe disk; with a server named, S3 as a fourth.

Try a server with: python examples/tiers.py http://127.0.0.1:9000 my-bucket

Prints::

    stored: 6 blocks in each tier
    after a restart: 6 blocks, asked lmdb: 6, bit-identical: True
    without its first tier: 6 blocks, asked lmdb: 0, nvme: 6, bit-identical: True
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace

SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
KEY = KVCacheKey.from_tokens(range(96), block_tokens=SPEC.block_tokens)
BLOCKS = torch.arange(len(KEY) * SPEC.nbytes // 2).to(torch.bfloat16).view(len(KEY), *SPEC.shape)


def config(folder: Path) -> dict[str, Any]:
    """Fastest first; the slower media would take blocks at their second use only, if nothing else were said."""
    tiers: list[dict[str, Any]] = [
        {"backend": "lmdb", "path": str(folder / "lmdb"), "capacity": "64MiB"},
        {"backend": "nvme", "path": str(folder / "nvme"), "capacity": "64MiB", "admit": "all"},
    ]
    if len(sys.argv) == 3:
        tiers.append({"backend": "s3", "endpoint_url": sys.argv[1], "bucket": sys.argv[2], "admit": "all"})
    return {"l1": {"capacity": "16MiB"}, "l2": tiers}


def open_cache(folder: Path) -> KVCache:
    """A cache with an empty L1, as after a restart."""
    return KVCache.open(config(folder), spec=SPEC, namespace=Namespace(model="example/tiny", revision="c0ffee"))


def restore(folder: Path, when: str) -> None:
    """Read everything back and say which tiers had it."""
    with open_cache(folder) as cache:
        out = torch.empty_like(BLOCKS)
        found = cache.get(KEY, out)
        asked = ", ".join(f"{t.name}: {t.counters.hits}" for t in cache.stats().tiers if t.counters.lookups)
        print(f"{when}: {found} blocks, asked {asked}, bit-identical: {torch.equal(out, BLOCKS)}")


with tempfile.TemporaryDirectory() as name:
    with open_cache(Path(name)) as first:
        print(f"stored: {first.put(KEY, BLOCKS)} blocks in each tier")
    restore(Path(name), "after a restart")
    shutil.rmtree(Path(name, "lmdb"))
    restore(Path(name), "without its first tier")
