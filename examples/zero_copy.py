"""Compute blocks straight into the cache's memory, and read them there: nothing is copied.

Prints::

    room for 4 blocks
    stored: 4
    pinned: 4 blocks, a tensor of shape (4, 2, 16, 2, 64)
    same memory at the next acquire: True
    deleted while pinned, still readable: True
    after the release: 0 blocks pinned
"""

from __future__ import annotations

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace

SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")


def main() -> None:
    """Write through a reservation, read through leases."""
    key = KVCacheKey.from_tokens(range(64), block_tokens=SPEC.block_tokens)
    config = {"l1": {"capacity": "16MiB"}, "l2": [{"backend": "memory", "capacity": "64MiB"}]}
    with KVCache.open(config, spec=SPEC, namespace=Namespace(model="example/tiny", revision="c0ffee")) as cache:
        with cache.allocate(key) as reservation:
            print(f"room for {reservation.blocks} blocks")
            for i, tensor in enumerate(reservation.tensors):
                tensor.fill_(i)  # a model would write its keys and values here
            reservation.commit()  # without this, leaving the block would discard them
        print("stored:", cache.lookup(key).blocks)

        with cache.acquire(key) as lease:
            print(f"pinned: {lease.blocks} blocks, a tensor of shape {tuple(lease.tensors[0].shape)}")
            with cache.acquire(key) as second:
                same = second.tensors[0].data_ptr() == lease.tensors[0].data_ptr()
                print("same memory at the next acquire:", same)

            cache.delete(key)  # takes the blocks out of the cache, not out of the lease
            readable = all(bool((tensor == i).all()) for i, tensor in enumerate(lease.tensors))
            print("deleted while pinned, still readable:", readable)

        l1 = cache.stats().l1
        if l1 is not None:
            print(f"after the release: {l1.pinned_blocks} blocks pinned")


if __name__ == "__main__":
    main()
