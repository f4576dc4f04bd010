"""Random sequences of public calls against a dict, over a real LMDB store."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore import BlockSpec, BlockStatus, KVCache, KVCacheKey, Namespace, Presence
from tests.support import KEY_KINDS, blocks_of, key_of, same_bytes

SPEC = BlockSpec(layers=2, kv_heads=1, head_dim=32, block_tokens=4, dtype="bfloat16")
CHAINS, LENGTH = 3, 6
spans = st.tuples(st.integers(0, CHAINS - 1), st.integers(0, LENGTH - 1), st.integers(1, LENGTH))


class CacheMachine(RuleBasedStateMachine):
    """The model holds the bytes that must come back; with room for everything nothing is evicted."""

    @initialize(kind=st.sampled_from(KEY_KINDS), l1=st.sampled_from(["off", "tiny", "large"]))
    def open(self, kind: Any, l1: str) -> None:
        self.folder = tempfile.mkdtemp()
        self.keys = [key_of(kind, LENGTH, seed=seed, block_tokens=4) for seed in range(CHAINS)]
        sections = {"off": {"enabled": False}, "tiny": {"capacity": 4 * 8192}, "large": {"capacity": "1MiB"}}
        self.config = {
            "l1": sections[l1],
            "l2": [{"backend": "lmdb", "path": self.folder + "/store", "capacity": "64MiB", "queue": "8MiB"}],
        }
        self.model: dict[bytes, torch.Tensor] = {}
        self.version = 0
        self.cache = self._open()

    def _open(self) -> KVCache:
        return KVCache.open(self.config, spec=SPEC, namespace=Namespace(model="m", revision="r"))

    def _span(self, span: tuple[int, int, int]) -> KVCacheKey:
        chain, start, length = span
        return self.keys[chain][start : start + length]

    @rule(span=spans)
    def put(self, span: tuple[int, int, int]) -> None:
        key = self._span(span)
        # content is a function of the block, as KV is
        blocks = torch.cat([blocks_of(SPEC, 1, seed=int.from_bytes(d[:4], "little")) for d in key])
        accepted = self.cache.put(key, blocks)
        self.cache.flush(10)
        for digest, block in zip(key.digests[:accepted], blocks, strict=False):
            self.model[digest] = block
        assert accepted > 0

    @rule(span=spans)
    def get(self, span: tuple[int, int, int]) -> None:
        key = self._span(span)
        expected = next((i for i, d in enumerate(key) if d not in self.model), len(key))
        out = torch.full((len(key), *SPEC.shape), 7.0, dtype=torch.bfloat16)
        untouched = out.clone()
        assert self.cache.lookup(key).blocks == expected
        assert self.cache.get(key, out) == expected
        assert all(same_bytes(out[i], self.model[key[i]]) for i in range(expected))
        assert same_bytes(out[expected:], untouched[expected:])

    @rule(span=spans)
    def get_each(self, span: tuple[int, int, int]) -> None:
        key = self._span(span)
        out = torch.zeros((len(key), *SPEC.shape), dtype=torch.bfloat16)
        here = [digest in self.model for digest in key]
        assert self.cache.contains_each(key) == [Presence.PRESENT if h else Presence.ABSENT for h in here]
        statuses = self.cache.get_each(key, out)
        assert statuses == [BlockStatus.DELIVERED if h else BlockStatus.ABSENT for h in here]
        assert all(same_bytes(out[i], self.model[key[i]]) for i, h in enumerate(here) if h)

    @precondition(lambda self: self.cache.config.l1.enabled)
    @rule(span=spans)
    def acquire(self, span: tuple[int, int, int]) -> None:
        key = self._span(span)
        with self.cache.acquire(key) as lease:
            assert all(same_bytes(t, self.model[d]) for t, d in zip(lease.tensors, key, strict=False))
            assert lease.blocks <= len(key)

    @rule(span=spans)
    def delete(self, span: tuple[int, int, int]) -> None:
        key = self._span(span)
        assert self.cache.delete(key) == sum(self.model.pop(digest, None) is not None for digest in key)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()

    @rule()
    def reopen(self) -> None:
        self.cache.close()
        self.cache = self._open()

    @invariant()
    def counters_add_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        stats = self.cache.stats()
        assert stats.cache.lookups == stats.cache.hits + stats.cache.misses
        tier = stats.tiers[0].counters
        assert tier.lookups == tier.hits + tier.misses
        assert (tier.corrupt, tier.key_mismatch, tier.io_errors, tier.timeouts) == (0, 0, 0, 0)
        assert stats.l1 is None or stats.l1.pinned_blocks == 0

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            shutil.rmtree(self.folder, ignore_errors=True)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
