"""A medium as far away as a test says, and caches in front of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.backend import Backend, Capability, Receive
from kvstore.gate import Gate
from kvstore.l2.counters import TierCounters
from kvstore.memory_backend import MemoryBackend
from kvstore.types import READ_PRIORITY, Call, Presence, ReadStatus
from tests import doubles
from tests.support import blocks_of, key_of

SPEC = BlockSpec(layers=2, kv_heads=1, head_dim=16, block_tokens=16, dtype="bfloat16")


class DistantBackend(doubles.PooledBackend):
    """Takes a latency and a time per block for each read.

    Attributes:
        latency_s: Of each call.
        block_s: For each record that is there.
        reads: Names asked for by each call.
        questions: How often a caller wanted to know what is there.
        status: Answered instead of reading, if set.
    """

    def __init__(self, latency_s: float = 0.0, block_s: float = 0.0) -> None:
        super().__init__()
        self.latency_s = latency_s
        self.block_s = block_s
        self.reads: list[int] = []
        self.questions = 0
        self.status: ReadStatus | None = None

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        self.reads.append(len(names))
        time.sleep(self.latency_s + self.block_s * sum(name in self._records for name in names))
        if self.status is not None:
            return [self.status] * len(names)
        return super().get_many(names, receive, call)

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        self.questions += call.priority == READ_PRIORITY
        return super().exists_many(names, call)


class DistantMemory(DistantBackend):
    """The same, read by the calling thread."""

    capabilities: ClassVar[Capability] = MemoryBackend.capabilities


class DistantPacks(DistantBackend):
    """The same, of whole packs that are not asked for existence before."""

    capabilities: ClassVar[Capability] = DistantBackend.capabilities | Capability.PACKS | Capability.PARALLEL


@dataclass
class Gated:
    """An open cache, and what a test asks of it."""

    cache: KVCache

    @property
    def gate(self) -> Gate:
        assert self.cache._state is not None
        return self.cache._state.stack.gate

    def stored(self, n_blocks: int, seed: int = 0) -> KVCacheKey:
        """A key whose blocks are in the tiers alone."""
        key = key_of("tokens", n_blocks, seed=seed)
        assert self.cache.put(key, blocks_of(SPEC, n_blocks, seed=seed)) == n_blocks
        self.cache.flush(20)
        assert self.cache._state is not None
        if self.cache._state.stack.l1 is not None:
            self.cache._state.stack.l1.clear()
        return key

    def get(self, key: KVCacheKey) -> int:
        return self.cache.get(key, torch.zeros((len(key), *SPEC.shape), dtype=SPEC.torch_dtype()))

    def learn(self, tier: int, *reads: tuple[int, float]) -> None:
        """Tell the gate what a tier's reads took, in blocks and seconds."""
        assert self.cache._state is not None
        for n_blocks, seconds in reads:
            self.cache._state.stack.tiers[tier].reader.times.note(n_blocks, seconds)

    def counters(self, tier: int = 0) -> TierCounters:
        return self.cache.stats().tiers[tier].counters


Open = Callable[..., Gated]


def open_gated(*backends: Backend, gate: Mapping[str, Any], l1: Mapping[str, Any] | None, **settings: Any) -> Gated:
    """Open a cache over backends, the first one in front."""
    registry, tiers = None, []
    for backend in backends:
        registry, name = doubles.register(lambda backend=backend: backend, registry)  # type: ignore[misc]
        tiers.append({"backend": name, **settings})
    config = {"l1": l1 or {"enabled": False}, "gate": dict(gate), "l2": tiers}
    namespace = Namespace(model="test/model", revision="r1")
    return Gated(KVCache.open(config, spec=SPEC, namespace=namespace, registry=registry))
