"""Run in a process of its own: puts blocks into the configured store, or gets them back.

Usage: round_trip.py put|get CONFIG
"""

from __future__ import annotations

import sys

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace

SPEC = BlockSpec(layers=2, kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
N_BLOCKS = 5


def main(action: str, config: str) -> None:
    """Put generated blocks, or get and write down what came back."""
    key = KVCacheKey.from_tokens(range(N_BLOCKS * 16), block_tokens=16)
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randn((N_BLOCKS, *SPEC.shape), generator=generator).to(torch.bfloat16)
    with KVCache.open(config, spec=SPEC, namespace=Namespace(model="m", revision="r")) as cache:
        if action == "put":
            print("accepted", cache.put(key, blocks))
            cache.flush(30)
        else:
            read = torch.zeros_like(blocks)
            print("delivered", cache.get(key, read))
            print("identical", torch.equal(read.view(torch.uint8), blocks.view(torch.uint8)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
