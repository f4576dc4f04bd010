"""Address blocks by an engine's own block hashes instead of by token ids.

vLLM (with --prefix-caching-hash-algo sha256_cbor) hands its connectors one 32-byte hash for each
block, and each hash already commits to everything before its block: that is chained=True.

Prints::

    the engine stores 4 blocks
    a library user, from token ids alone: 4 of 4 blocks
    one block in the middle, asked for alone: DELIVERED
    hashes of content only are another thing: 0 of 4 blocks
"""

from __future__ import annotations

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.keys.chains import vllm_block_hashes

SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")


def main() -> None:
    """Store by hashes, then find the blocks again in three ways."""
    prompt = list(range(2000, 2064))
    engine_hashes: list[bytes] = vllm_block_hashes(prompt, SPEC.block_tokens)  # an engine brings its own
    key = KVCacheKey.from_block_hashes(engine_hashes, block_tokens=SPEC.block_tokens, chained=True)
    blocks = torch.randn(len(key), *SPEC.shape).to(torch.bfloat16)

    config = {"l1": {"capacity": "16MiB"}, "l2": [{"backend": "memory", "capacity": "64MiB"}]}
    with KVCache.open(config, spec=SPEC, namespace=Namespace(model="example/tiny", revision="c0ffee")) as cache:
        print(f"the engine stores {cache.put(key, blocks)} blocks")

        computed = vllm_block_hashes(prompt, SPEC.block_tokens)
        again = KVCacheKey.from_block_hashes(computed, block_tokens=SPEC.block_tokens, chained=True)
        print(f"a library user, from token ids alone: {cache.lookup(again).blocks} of {len(again)} blocks")

        # A chained hash stands alone, so an engine may ask for any block without those before it.
        middle = KVCacheKey.from_block_hashes(engine_hashes[2:3], block_tokens=SPEC.block_tokens, chained=True)
        out = torch.empty(1, *SPEC.shape, dtype=torch.bfloat16)
        print("one block in the middle, asked for alone:", cache.get_each(middle, out)[0].name)

        unchained = KVCacheKey.from_block_hashes(engine_hashes, block_tokens=SPEC.block_tokens, chained=False)
        found = cache.lookup(unchained).blocks
        print(f"hashes of content only are another thing: {found} of {len(unchained)} blocks")


if __name__ == "__main__":
    main()
