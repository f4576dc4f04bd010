"""A storage medium of your own, registered in this process and selected by name.

An installable one is the same plus an entry point: see docs/reference/hooks.md.

Prints::

    stored a record of 32976 bytes under a name of 49 bytes
    stored a record of 32976 bytes under a name of 49 bytes
    stored a record of 32976 bytes under a name of 49 bytes
    asked for 3 names
    delivered: 3, bit-identical: True
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace, hookimpl
from kvstore.backend import PutItem, Receive
from kvstore.memory_backend import MemoryBackend, MemoryOptions
from kvstore.plugins import BackendPlugin, Registry
from kvstore.types import Call, PutStatus, ReadStatus


class TellingBackend(MemoryBackend):
    """Says what reaches it: names and bytes, never tokens or tensors."""

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Store records; they are encoded and checksummed already."""
        for item in items:
            print(f"stored a record of {item.nbytes} bytes under a name of {len(item.name)} bytes")
        return super().put_many(items, call)

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Hand records out; the core verifies each of them."""
        print(f"asked for {len(names)} names")
        return super().get_many(names, receive, call)


@hookimpl
def kvstore_register_backends() -> list[BackendPlugin]:
    """Describe it; the options dataclass is the schema of its config section."""
    return [BackendPlugin(name="telling", options=MemoryOptions, factory=TellingBackend, summary="Tells what it does")]


if __name__ == "__main__":
    registry = Registry.discover()
    registry.register(sys.modules[__name__], "telling")
    spec = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
    config = {"l1": {"enabled": False}, "l2": [{"backend": "telling", "codec": "none"}]}
    key = KVCacheKey.from_tokens(range(48), block_tokens=spec.block_tokens)
    blocks, out = torch.randn(2, len(key), *spec.shape).to(torch.bfloat16)
    namespace = Namespace(model="example/tiny", revision="c0ffee")
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        cache.put(key, blocks)
        cache.flush()
        print(f"delivered: {cache.get(key, out)}, bit-identical: {torch.equal(out, blocks)}")
