"""Kinds of E and F that are about what calls do to each other: order, purity, tiers that hold different things."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvstore import KVCache
from kvstore.blocks import BlockEncoder
from kvstore.codec import Codec
from kvstore.record import RecordMeta
from kvstore.spec import BlockSpec
from kvstore.types import Call, Presence
from tests import doubles
from tests.faults.store import Store, over
from tests.fuzz.worlds import codec_named
from tests.support_faults import NAMESPACE, SMALL, chain, gauss, noise, same, target, unrelated

N = 10


class OneStuck(doubles.PooledBackend):
    """Reads of one name hang until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = b""
        self.entered = threading.Event()
        self.release = threading.Event()

    def get_many(self, names: Any, receive: Any, call: Any) -> Any:
        if self.stuck in names:
            self.entered.set()
            self.release.wait(20)
        return super().get_many(names, receive, call)


def test_a_transfer_that_is_stuck_holds_up_no_other() -> None:
    """F6: ten transfers, the first of which hangs; nine are complete long before anybody asks in order."""
    backend = OneStuck()
    registry, name = doubles.register(lambda: backend)
    config = {"l1": {"enabled": False}, "l2": [{"backend": name, "deadline": "10s", "workers": 4}]}
    with KVCache.open(config, spec=SMALL, namespace=NAMESPACE, registry=registry) as cache:
        for i in range(N):
            cache.put(unrelated(i), noise(SMALL, [i]))
        cache.flush(10)
        assert cache._state is not None
        (backend.stuck,) = cache._state.stack.tiers[0].tier.names(1, unrelated(0).digests)
        outs = [target(SMALL) for _ in range(N)]
        transfers = [cache.submit_get(unrelated(i), outs[i]) for i in range(N)]
        try:
            assert backend.entered.wait(10)
            assert [transfers[i].wait(8) for i in range(1, N)] == [1] * (N - 1)
            assert all(same(outs[i], noise(SMALL, [i])) for i in range(1, N))
            assert not transfers[0].poll()
        finally:
            backend.release.set()
        assert transfers[0].wait(10) == 1
        assert same(outs[0], noise(SMALL, [0]))


@over("LNTS")
def test_looking_changes_nothing_about_what_is_stored_next(store: Store) -> None:
    """E9: however often somebody looks past the end of what is stored, a put of the rest leaves no hole."""
    with store.open() as cache:
        cache.store(chain(4), noise(SMALL, range(4)))
        for _ in range(5):
            assert cache.lookup(chain(N)).blocks == 4
            assert cache.contains_each(chain(N)) == [Presence.PRESENT] * 4 + [Presence.ABSENT] * 6
            assert cache.get(chain(N), target(SMALL, N)) == 4
        assert cache.put(chain(N), noise(SMALL, range(N))) == N
        cache.flush(60)
        out = target(SMALL, N)
        assert cache.get(chain(N), out) == N
        assert same(out, noise(SMALL, range(N)))


def test_tiers_that_lack_different_blocks_are_each_completed_by_a_put() -> None:
    """E10: no tier is taken for a part of another; each gets what it lacks."""
    config = {"l1": {"capacity": "4MiB"}, "l2": [{"backend": "memory", "name": name} for name in ("upper", "lower")]}
    with KVCache.open(config, spec=SMALL, namespace=NAMESPACE) as cache:
        key, blocks = chain(6), noise(SMALL, range(6))
        cache.put(key, blocks)
        cache.flush(10)
        assert cache._state is not None
        stacked = cache._state.stack.tiers
        for place, lost in ((0, key[1:3]), (1, key[4:6])):
            tier = stacked[place].tier
            assert tier.backend.delete_many(tier.names(lost.kind, lost.digests), Call.within(30)) == 2
        assert cache._state.stack.l1 is not None
        cache._state.stack.l1.clear()
        assert cache.put(key, blocks) == 6
        cache.flush(10)
        for stack in stacked:
            names = stack.tier.names(key.kind, key.digests)
            assert stack.tier.backend.exists_many(names, Call.within(30)) == [Presence.PRESENT] * 6


@pytest.mark.parametrize("codec", ["zstd", "planes", "planes-base"])
def test_a_block_that_does_not_shrink_costs_one_segment_of_compression(codec: str) -> None:
    """F4: random bytes go raw after the first segment, whatever the codec, and take no more room."""
    spec = BlockSpec(layers=8, kv_heads=8, head_dim=128, block_tokens=64, dtype="bfloat16")  # 2 MiB, 8 segments
    counted = Counted(codec_named(codec))
    encoder = BlockEncoder(spec, bytes(16), counted)
    encoded = encoder.encode(raw_of(noise(spec, [1])), RecordMeta(bytes(32)))
    assert encoded.stored_raw
    assert encoded.nbytes <= spec.nbytes + 192 + 16 * 8
    assert counted.calls == 1
    real = encoder.encode(raw_of(gauss(spec, [1])), RecordMeta(bytes(32)))
    assert real.nbytes < 0.95 * spec.nbytes
    assert counted.calls == 1 + 8


def raw_of(blocks: torch.Tensor) -> memoryview:
    return memoryview(blocks.contiguous().view(torch.uint8).numpy().tobytes())


class Counted(Codec):
    """Counts the segments that a codec was asked to encode."""

    codec_id, name = 2, "counted"

    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self.calls = 0

    def supports(self, spec: Any) -> bool:
        return self._inner.supports(spec)

    def encode_segment(self, raw: memoryview, geometry: Any) -> Any:
        self.calls += 1
        return self._inner.encode_segment(raw, geometry)

    def open_segment(self, stored: memoryview, geometry: Any) -> Any:
        return self._inner.open_segment(stored, geometry)
