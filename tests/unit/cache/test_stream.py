"""Layers come in order, verified, while later ones are still being read."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.backend import Capability, Receive
from kvstore.memory_backend import MemoryBackend
from kvstore.stream import LayerGroup, plan_layers
from kvstore.types import Call, ReadStatus
from tests import doubles
from tests.support import MakeKey, OpenCache, OpenDouble, blocks_of, same_bytes


@pytest.fixture
def spec() -> BlockSpec:
    """1 MiB in 4 segments of 4 layers."""
    return BlockSpec(layers=16, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")


@pytest.fixture(params=["memory", "lmdb", "lmdb planes", "lmdb and l1"])
def cache(request: pytest.FixtureRequest, open_cache: OpenCache, tmp_path: Path) -> KVCache:
    tier: dict[str, Any] = {"backend": "memory", "capacity": "64MiB"}
    if request.param.startswith("lmdb"):
        codec = "planes" if request.param.endswith("planes") else "none"
        tier = {"backend": "lmdb", "capacity": "64MiB", "path": str(tmp_path / "store"), "codec": codec}
    l1 = {"capacity": "5MiB"} if request.param.endswith("l1") else {"enabled": False}
    return open_cache({"l1": l1, "l2": [tier]})


def store(cache: KVCache, key: KVCacheKey, blocks: torch.Tensor) -> None:
    """Put blocks one by one, so that an L1 which is smaller than the key is no obstacle."""
    for i in range(len(key)):
        assert cache.put(key[i : i + 1], blocks[i : i + 1]) == 1
        cache.flush(10)


def whole(groups: Sequence[LayerGroup], spec: BlockSpec) -> torch.Tensor:
    """The groups put side by side, cut to the blocks that are good in all of them."""
    assert [g.first_layer for g in groups] == [sum(g.n_layers for g in groups[:i]) for i in range(len(groups))]
    n = groups[-1].n_blocks
    joined = torch.cat([g.tensor[:n] for g in groups], dim=1)
    assert joined.shape == (n, *spec.shape)
    return joined


def test_the_layers_make_up_the_blocks(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(6), blocks_of(spec, 6)
    store(cache, key, blocks)

    groups = list(cache.stream(key))

    assert [g.n_layers for g in groups] == [4, 4, 4, 4]
    assert same_bytes(whole(groups, spec), blocks)


def test_a_stream_ends_at_the_first_hole(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(6), blocks_of(spec, 6)
    store(cache, key, blocks)
    cache.delete(key[3:4])

    assert same_bytes(whole(list(cache.stream(key)), spec), blocks[:3])
    assert list(cache.stream(key[3:])) == []


def test_hits_and_misses_are_lookups(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key = make_key(8)
    store(cache, key[:6], blocks_of(spec, 6))

    list(cache.stream(key))
    counters = cache.stats().cache

    assert (counters.lookups, counters.hits, counters.misses) == (8, 6, 2)


def test_leaving_early_lets_go_of_everything(cache: KVCache, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(6), blocks_of(spec, 6)
    store(cache, key, blocks)

    stream = cache.stream(key)
    first = next(stream)
    stream.close()  # type: ignore[attr-defined]

    l1 = cache.stats().l1
    assert l1 is None or l1.pinned_blocks == 0
    assert same_bytes(first.tensor.contiguous(), blocks[:, :4].contiguous())


def test_other_layouts_come_as_one_group(open_cache: OpenCache, make_key: MakeKey) -> None:
    spec = BlockSpec(layers=16, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16", layout="NCLD")
    cache = open_cache({"l1": {"enabled": False}, "l2": [{"backend": "memory"}]}, spec=spec)
    key, blocks = make_key(3), blocks_of(spec, 3)
    store(cache, key, blocks)

    (group,) = cache.stream(key)

    assert (group.first_layer, group.n_layers, group.n_blocks) == (0, 16, 3)
    assert same_bytes(group.tensor, blocks)


def test_tiers_add_up_to_one_stream(open_cache: OpenCache, spec: BlockSpec, make_key: MakeKey, tmp_path: Path) -> None:
    tiers = [{"backend": "lmdb", "name": name, "path": str(tmp_path / name), "admit": "all"} for name in ("a", "b")]
    key, blocks = make_key(8), blocks_of(spec, 8)
    for tier, part in (("a", slice(0, 4)), ("b", slice(4, 8))):
        config = {"l1": {"enabled": False}, "l2": [t for t in tiers if t["name"] == tier]}
        writer = open_cache(config)
        writer.put(key[part], blocks[part])
        writer.close()

    cache = open_cache({"l1": {"enabled": False}, "l2": tiers})

    assert same_bytes(whole(list(cache.stream(key)), spec), blocks)
    assert {t.name: t.counters.hits for t in cache.stats().tiers} == {"a": 4, "b": 4}


class RangesGate(MemoryBackend):
    """Reads ranges only, and only as many calls as the gate lets through."""

    capabilities: ClassVar[Capability] = (
        (MemoryBackend.capabilities & ~Capability.CALLER_READS) | Capability.RANGES | Capability.PARALLEL
    )

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self.asked: list[tuple[int, int]] = []
        self.damaged_from = 1 << 40
        """Bytes of record 2 from here on are flipped."""

    def get_ranges(
        self, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
    ) -> list[ReadStatus]:
        self.asked.append(ranges[0])
        self.allowed.acquire(timeout=30)

        def damage(i: int, view: memoryview) -> None:
            start = max(self.damaged_from - ranges[i][0], 0)
            if i == 2 and start < len(view):
                flipped = bytearray(view)
                flipped[start] ^= 1
                view = memoryview(flipped)
            receive(i, view)

        return super().get_ranges(names, ranges, damage, call)


@pytest.fixture
def gated(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> tuple[RangesGate, KVCache]:
    medium = RangesGate()
    cache = open_double(lambda: medium, codec="none", deadline="2s")
    cache.put(make_key(6), blocks_of(spec, 6))
    cache.flush(10)
    return medium, cache


def test_the_first_layers_do_not_wait_for_the_last(make_key: MakeKey, namespace: Namespace) -> None:
    spec = BlockSpec(layers=32, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")  # two groups of 1 MiB
    medium = RangesGate()
    registry, name = doubles.register(lambda: medium)
    config = {"l1": {"enabled": False}, "l2": [{"backend": name, "codec": "none"}]}
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        key, blocks = make_key(4), blocks_of(spec, 4)
        cache.put(key, blocks)
        cache.flush(10)
        stream = cache.stream(key)

        medium.allowed.release()
        first = next(stream)  # the second call is waiting at the gate meanwhile
        medium.allowed.release()
        rest = list(stream)

        assert same_bytes(whole([first, *rest], spec), blocks)
        assert len(medium.asked) == 2
        assert medium.asked[0][1] <= medium.asked[1][0] + (192 + 16 * 9) * 2  # nothing is read twice but a head


def test_damage_in_a_block_shortens_the_stream_before_it(
    gated: tuple[RangesGate, KVCache], spec: BlockSpec, make_key: MakeKey
) -> None:
    medium, cache = gated
    medium.damaged_from = 4096
    medium.allowed.release(8)

    groups = list(cache.stream(make_key(6)))

    assert groups[-1].n_blocks == 2
    assert same_bytes(whole(groups, spec), blocks_of(spec, 6)[:2])
    counters = cache.stats().tiers[0].counters
    assert (counters.corrupt, counters.hits, counters.misses) == (1, 2, 4)
    assert cache.lookup(make_key(6)).blocks == 2  # what was found bad is not offered again


def test_a_hung_medium_ends_the_stream_within_the_deadline(
    gated: tuple[RangesGate, KVCache], make_key: MakeKey
) -> None:
    medium, cache = gated
    started = time.monotonic()

    assert list(cache.stream(make_key(6))) == []

    assert time.monotonic() - started < 6
    assert cache.stats().tiers[0].counters.timeouts == 1
    medium.allowed.release(8)  # let the thread go


def test_groups_are_whole_segments_of_at_least_the_wanted_size(spec: BlockSpec) -> None:
    for least in (1, 256 << 10, 300 << 10, 512 << 10, 1 << 20, 1 << 30):
        plans = plan_layers(spec, least)

        assert sum(plan.raw_bytes for plan in plans) == spec.nbytes
        assert len(plans) == 1 or all(plan.raw_bytes >= least for plan in plans)
        assert [plan.first_segment for plan in plans] == [
            sum(len(p.segments) for p in plans[:i]) for i in range(len(plans))
        ]
