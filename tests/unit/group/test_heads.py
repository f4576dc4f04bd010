"""Blocks cut and joined along their heads, and why some cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import (
    BlockSpec,
    BlockStatus,
    ConfigError,
    HeadCache,
    KVCache,
    KVCacheKey,
    Namespace,
    Presence,
    SpecMismatchError,
)
from tests.support import KEY_KINDS, blocks_of, key_of, same_bytes

N = 5
SPEC = BlockSpec(layers=3, kv_heads=6, head_dim=32, block_tokens=16, dtype="bfloat16")
WHOLE = Namespace(model="m", revision="r", kv_heads=(0, 6))


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    store = {"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "64MiB"}
    return {"l1": {"capacity": "4MiB"}, "l2": [store]}


def part(config: Any, heads: tuple[int, int], spec: BlockSpec = SPEC) -> KVCache:
    """The cache of a rank that holds some heads."""
    own = replace(spec, kv_heads=heads[1] - heads[0])
    return KVCache.open(config, spec=own, namespace=replace(WHOLE, kv_heads=heads))


def narrowed(blocks: torch.Tensor, spec: BlockSpec, heads: tuple[int, int]) -> torch.Tensor:
    return blocks.narrow(1 + spec.axes.index("H"), heads[0], heads[1] - heads[0]).contiguous()


def put(cache: KVCache | HeadCache, key: KVCacheKey, blocks: torch.Tensor) -> None:
    assert cache.put(key, blocks) == len(key)
    cache.flush(20)


@pytest.mark.parametrize("layout", ["LCND", "NCLD", "LCHND", "HLCND", "LNCHD"])
@pytest.mark.parametrize("kind", KEY_KINDS)
def test_parts_of_unequal_width_are_joined_bit_for_bit(config: Any, layout: str, kind: Any) -> None:
    spec = replace(SPEC, layout=layout)
    key, blocks = key_of(kind, N), blocks_of(spec, N)
    for heads in ((0, 1), (1, 4), (4, 6)):
        with part(config, heads, spec) as rank:
            put(rank, key, narrowed(blocks, spec, heads))

    out = torch.zeros_like(blocks)
    with HeadCache.open(config, spec=spec, namespace=WHOLE, stored_heads=[(4, 6), (0, 1), (1, 4)]) as cache:
        assert cache.lookup(key).blocks == N
        assert cache.get(key, out) == N
        assert same_bytes(out, blocks)
        apart = [torch.zeros(spec.shape, dtype=torch.bfloat16) for _ in range(N)]
        assert cache.get(key, apart) == N
        assert same_bytes(torch.stack(apart), blocks)


def test_a_wider_block_is_read_in_part_and_never_written(config: Any) -> None:
    key, blocks = key_of("tokens", N), blocks_of(SPEC, N)
    with part(config, (0, 6)) as whole:
        put(whole, key, blocks)

    heads = (2, 5)
    expected = narrowed(blocks, SPEC, heads)
    own = replace(SPEC, kv_heads=3)
    with HeadCache.open(config, spec=own, namespace=replace(WHOLE, kv_heads=heads), stored_heads=[(0, 6)]) as cache:
        out = torch.zeros_like(expected)
        assert cache.get(key, out) == N
        assert same_bytes(out, expected)
        assert cache.get_each(key, torch.zeros_like(expected)) == [BlockStatus.DELIVERED] * N
        with pytest.raises(ConfigError, match=r"put\(\) has 3 of the heads 0-5 that a stored block holds"):
            cache.put(key, expected)


def test_a_namespace_without_a_range_is_the_whole_model(config: Any) -> None:
    key, blocks = key_of("tokens", N), blocks_of(SPEC, N)
    with KVCache.open(config, spec=SPEC, namespace=replace(WHOLE, kv_heads=None)) as whole:
        put(whole, key, blocks)

    own = replace(SPEC, kv_heads=2)
    for stored, found in ((6, N), ([(0, 6)], 0)):
        namespace = replace(WHOLE, kv_heads=(4, 6))
        with HeadCache.open(config, spec=own, namespace=namespace, stored_heads=stored) as cache:
            out = torch.zeros((N, *own.shape), dtype=torch.bfloat16)
            assert cache.get(key, out) == found
            assert same_bytes(out[:found], narrowed(blocks, SPEC, (4, 6))[:found])


def test_a_block_is_there_when_all_its_parts_are(config: Any) -> None:
    key, blocks = key_of("block-hashes", N), blocks_of(SPEC, N)
    with HeadCache.open(config, spec=SPEC, namespace=WHOLE, stored_heads=[(0, 3), (3, 6)]) as cache:
        put(cache, key, blocks)
        assert cache.caches[3, 6].delete(key[3:4]) == 1
        out = torch.full_like(blocks, 7.0)
        untouched = out.clone()

        assert cache.lookup(key).blocks == 3
        assert cache.get(key, out) == 3
        assert same_bytes(out[:3], blocks[:3])
        assert same_bytes(out[3:], untouched[3:])
        assert cache.contains_each(key) == [Presence.ABSENT if i == 3 else Presence.PRESENT for i in range(N)]
        out = untouched.clone()
        assert cache.get_each(key, out) == [BlockStatus.ABSENT if i == 3 else BlockStatus.DELIVERED for i in range(N)]
        assert same_bytes(out[3], untouched[3])
        assert all(same_bytes(out[i], blocks[i]) for i in (0, 1, 2, 4))
        assert cache.delete(key) == N, "one part of block 3 was still there"
        assert cache.lookup(key).blocks == 0


def test_clear_flush_stats_and_health_are_about_every_part(config: Any) -> None:
    key, blocks = key_of("tokens", N), blocks_of(SPEC, N)
    with HeadCache.open(config, spec=SPEC, namespace=WHOLE, stored_heads=[(0, 3), (3, 6)]) as cache:
        put(cache, key, blocks)
        assert {heads: stats.cache.puts for heads, stats in cache.stats().items()} == {(0, 3): N, (3, 6): N}
        assert {heads: health.state for heads, health in cache.health().items()} == {(0, 3): "ok", (3, 6): "ok"}
        assert sum(c.config.l1.capacity for c in cache.caches.values()) == 4 << 20
        assert sum(c.config.defaults.deadline for c in cache.caches.values()) == pytest.approx(5.0)
        assert repr(cache) == "<HeadCache of 6 heads from 0-2, 3-5>"
        cache.clear()
        assert cache.lookup(key).blocks == 0


@pytest.mark.parametrize(
    ("changes", "stored", "reason"),
    [
        ({}, [(0, 4), (4, 8)], "stored_heads is .* the heads 0-5 are wanted"),
        ({}, [(0, 2), (3, 6)], "without gap or overlap"),
        ({}, [(0, 4), (2, 6)], "without gap or overlap"),
        ({}, [(1, 6)], "one range that contains them"),
        ({}, [], "expected ranges"),
        ({"kv_heads": None}, [(0, 6)], "kv_heads is not set"),
        ({"kv_heads": (0, 4)}, [(0, 6)], "not as many heads as spec.kv_heads 6"),
        ({"engine_layout": "packed"}, [(0, 3), (3, 6)], "engine_layout 'packed' says"),
        ({"lossy_codec": 200}, [(0, 3), (3, 6)], "lossy codec 200 ran over all heads"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_reason(
    config: Any, changes: dict[str, Any], stored: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        HeadCache.open(config, spec=SPEC, namespace=replace(WHOLE, **changes), stored_heads=stored)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (BlockSpec.opaque(4096, block_tokens=16, tag="rows"), "opaque: only the engine knows"),
        (replace(SPEC, kv=1, kv_heads=1), r"MLA latents \(kv=1\) are the same on every rank"),
    ],
)
def test_blocks_without_heads_are_refused_with_a_reason(config: Any, spec: BlockSpec, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        HeadCache.open(config, spec=spec, namespace=replace(WHOLE, kv_heads=(0, 1)), stored_heads=[(0, 1)])


def test_l1_is_needed(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"l1\.enabled is false"):
        HeadCache.open(config | {"l1": {"enabled": False}}, spec=SPEC, namespace=WHOLE, stored_heads=[(0, 6)])


def test_tensors_that_do_not_fit_are_refused(config: Any) -> None:
    key = key_of("tokens", N)
    with HeadCache.open(config, spec=SPEC, namespace=WHOLE, stored_heads=[(0, 3), (3, 6)]) as cache:
        with pytest.raises(SpecMismatchError, match="out has shape"):
            cache.get(key, torch.zeros((N, 3, 3), dtype=torch.bfloat16))
        with pytest.raises(SpecMismatchError, match="takes a tensor or a sequence of tensors"):
            cache.put(key, object())  # type: ignore[arg-type]


def test_each_part_may_take_its_share_of_the_time_to_compute(config: Any) -> None:
    ranges = [(0, 1), (1, 4), (4, 6)]
    configured = config | {"gate": {"prefill_tokens_per_s": 1000}}
    with HeadCache.open(configured, spec=SPEC, namespace=WHOLE, stored_heads=ranges) as cache:
        assert [stats.prefill_tokens_per_s for stats in cache.stats().values()] == pytest.approx([3000] * 3)
    with HeadCache.open(config, spec=SPEC, namespace=WHOLE, stored_heads=ranges) as cache:
        for _ in range(3):
            cache.note_prefill(1000, 1.0)
        assert [stats.prefill_tokens_per_s for stats in cache.stats().values()] == pytest.approx([3000] * 3)
