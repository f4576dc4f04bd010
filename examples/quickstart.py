"""Store the KV blocks of a prompt on disk, close, open again, and get the same bytes back.

Prints::

    6 blocks of 32768 bytes, 4 tokens left over
    stored: 6
    found after reopening: 6 blocks, 96 tokens
    delivered: 6, bit-identical: True
    a longer prompt with the same start: 6 of 8 blocks are known
"""

from __future__ import annotations

import tempfile

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace

# What one block looks like, and whose KV it is. Both decide which caches share.
SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
NAMESPACE = Namespace(model="example/tiny", revision="c0ffee")


def main() -> None:
    """Run the example in a temporary folder."""
    prompt = list(range(1000, 1100))  # token ids, from your tokenizer
    key = KVCacheKey.from_tokens(prompt, block_tokens=SPEC.block_tokens)
    blocks = torch.randn(len(key), *SPEC.shape).to(torch.bfloat16)  # from your model
    print(f"{len(key)} blocks of {SPEC.nbytes} bytes, {key.n_tail_tokens} tokens left over")

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "l1": {"capacity": "16MiB"},
            "l2": [{"backend": "lmdb", "path": folder, "capacity": "64MiB"}],
        }
        with KVCache.open(config, spec=SPEC, namespace=NAMESPACE) as cache:
            print("stored:", cache.put(key, blocks))  # leaving the block writes out what is queued

        with KVCache.open(config, spec=SPEC, namespace=NAMESPACE) as cache:
            found = cache.lookup(key)
            print(f"found after reopening: {found.blocks} blocks, {found.tokens} tokens")
            out = torch.empty_like(blocks)
            delivered = cache.get(key, out)
            same = torch.equal(out.view(torch.uint8), blocks.view(torch.uint8))
            print(f"delivered: {delivered}, bit-identical: {same}")

            longer = KVCacheKey.from_tokens(prompt[:96] + [7] * 32, block_tokens=SPEC.block_tokens)
            known = cache.lookup(longer).blocks
            print(f"a longer prompt with the same start: {known} of {len(longer)} blocks are known")


if __name__ == "__main__":
    main()
