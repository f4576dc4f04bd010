"""Two processes share one LMDB directory, without a server between them.

Prints::

    parent: stored 4 blocks
    child: found 4 blocks of the parent, bit-identical: True; stored 2 more
    parent: the conversation has 6 blocks now
    parent: after its clear() the child's blocks are gone too: 0 blocks
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace

SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
KEY = KVCacheKey.from_tokens(range(96), block_tokens=SPEC.block_tokens)
SHARED, NEW = KEY.split(4)


def open_cache(folder: str) -> KVCache:
    """Both processes say the same: equal namespace, spec and directory share."""
    config = {"l1": {"capacity": "16MiB"}, "l2": [{"backend": "lmdb", "path": folder, "capacity": "64MiB"}]}
    return KVCache.open(config, spec=SPEC, namespace=Namespace(model="example/tiny", revision="c0ffee"))


def numbered(first: int, n_blocks: int) -> torch.Tensor:
    """Blocks whose content both processes know."""
    return torch.stack([torch.full(SPEC.shape, i, dtype=torch.bfloat16) for i in range(first, first + n_blocks)])


def child(folder: str) -> None:
    """Read what the parent stored, and store what follows it."""
    with open_cache(folder) as cache:
        out = torch.empty(len(SHARED), *SPEC.shape, dtype=torch.bfloat16)
        print(f"child: found {cache.get(SHARED, out)} blocks of the parent, ", end="")
        print(f"bit-identical: {torch.equal(out, numbered(0, 4))}; stored {cache.put(NEW, numbered(4, 2))} more")


def parent() -> None:
    """Store, let the child run, and see what it left."""
    with tempfile.TemporaryDirectory() as folder, open_cache(folder) as cache:
        print(f"parent: stored {cache.put(SHARED, numbered(0, 4))} blocks", flush=True)
        cache.flush()
        subprocess.run([sys.executable, __file__, folder], check=True)  # noqa: S603 - this very file
        print(f"parent: the conversation has {cache.lookup(KEY).blocks} blocks now")
        cache.clear()
        print(f"parent: after its clear() the child's blocks are gone too: {cache.lookup(KEY).blocks} blocks")


if __name__ == "__main__":
    if sys.argv[1:]:
        child(sys.argv[1])
    else:
        parent()
