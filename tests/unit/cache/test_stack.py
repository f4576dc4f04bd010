"""How blocks move between the tiers: up after reads, down when they leave L1, over damaged copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, BlockStatus, KVCache, Namespace
from kvstore.backend import PutItem
from kvstore.seen import FreshChains
from kvstore.types import Call, PutStatus
from tests import doubles
from tests.support import MakeKey, blocks_of, same_bytes
from tests.unit.cache.stacks import Layers, open_layers

OFF = {"enabled": False}
OpenLayers = Callable[..., Layers]


class PooledCounting(doubles.CountingBackend):
    """Read by the tier's own threads."""

    capabilities = doubles.PooledBackend.capabilities


@pytest.fixture
def layers(spec: BlockSpec, request: pytest.FixtureRequest) -> OpenLayers:
    def make(l1: dict[str, Any], *, max_writers: int = 1, **tiers: Any) -> Layers:
        described = {name: t if isinstance(t, tuple) else (t, {}) for name, t in tiers.items()}
        opened = open_layers(spec, l1, described, max_writers=max_writers)
        request.addfinalizer(opened.cache.close)
        return opened

    return make


def three(layers: OpenLayers, l1: dict[str, Any], **admit: str) -> Layers:
    tiers = {name: (PooledCounting(), {"admit": admit.get(name, "all")}) for name in ("fast", "middle", "slow")}
    return layers(l1, **tiers)


def damage(layers: Layers, tier: str, digest: bytes) -> None:
    """Flip a payload byte of a stored record."""
    records = layers.backends[tier]._records
    name = next(n for n in records if n[17:] == digest)
    data, at = records[name]
    records[name] = (data[:-1] + bytes([data[-1] ^ 1]), at)


# -- promotion


@pytest.mark.parametrize("l1", [OFF, {"capacity": "8MiB"}], ids=["no L1", "L1"])
def test_blocks_move_up_to_every_faster_tier_that_takes_all(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey, l1: dict[str, Any]
) -> None:
    stack = three(layers, l1)
    key, blocks = make_key(6), blocks_of(spec, 6)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    for upper in ("fast", "middle"):
        stack.drop(upper, key.digests)
    if stack.stack.l1 is not None:
        stack.l1.clear()
    written = len(stack.backends["slow"].put_names)
    out = torch.zeros_like(blocks)

    assert stack.cache.get(key, out) == 6
    stack.cache.flush(10)

    assert same_bytes(out, blocks)
    assert stack.leads("fast", key) == stack.leads("middle", key) == 6
    assert len(stack.backends["slow"].put_names) == written  # never back to where it came from
    out.zero_()
    if stack.stack.l1 is not None:
        stack.l1.clear()
    assert stack.cache.get(key, out) == 6
    assert same_bytes(out, blocks)
    assert stack.counters("fast").hits == 6


def test_only_what_a_slower_tier_delivered_moves_up(layers: OpenLayers, spec: BlockSpec, make_key: MakeKey) -> None:
    stack = three(layers, {"capacity": "8MiB"})
    key, blocks = make_key(6), blocks_of(spec, 6)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    stack.drop("fast", key.digests[2:])
    stack.drop("middle", key.digests[4:])
    stack.l1.clear()
    before = {name: len(backend.put_names) for name, backend in stack.backends.items()}

    assert stack.cache.get(key, torch.zeros_like(blocks)) == 6
    stack.cache.flush(10)

    written = {name: len(backend.put_names) - before[name] for name, backend in stack.backends.items()}
    assert written == {"fast": 4, "middle": 2, "slow": 0}


def test_a_tier_for_hot_blocks_gets_promoted_blocks_at_their_second_use(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey
) -> None:
    stack = three(layers, {"capacity": "8MiB"}, fast="hot")
    key, blocks = make_key(4), blocks_of(spec, 4)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    assert stack.leads("fast", key) == 0

    assert stack.cache.get(key, torch.zeros_like(blocks)) == 4
    stack.cache.flush(10)

    assert stack.leads("fast", key) == 4


@pytest.mark.parametrize("l1", [OFF, {"capacity": "8MiB"}], ids=["no L1", "L1"])
def test_a_slower_tier_for_hot_blocks_gets_what_a_faster_one_delivers_twice(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey, l1: dict[str, Any]
) -> None:
    stack = three(layers, l1, slow="hot")
    key, blocks = make_key(4), blocks_of(spec, 4)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    assert stack.leads("slow", key) == 0

    assert stack.cache.get(key, torch.zeros_like(blocks)) == 4
    stack.cache.flush(10)

    assert stack.leads("slow", key) == 4


def test_a_tier_for_evicted_blocks_gets_nothing_from_below(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey
) -> None:
    stack = three(layers, {"capacity": "8MiB"}, fast="evicted")
    key, blocks = make_key(4), blocks_of(spec, 4)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    stack.l1.clear()

    assert stack.cache.get(key, torch.zeros_like(blocks)) == 4
    stack.cache.flush(10)

    assert stack.backends["fast"].put_names == []


def test_a_hit_that_changes_nothing_asks_no_tier(layers: OpenLayers, spec: BlockSpec, make_key: MakeKey) -> None:
    stack = layers(
        {"capacity": "8MiB"}, fast=doubles.CountingBackend(), slow=(doubles.CountingBackend(), {"admit": "hot"})
    )
    key, blocks = make_key(4), blocks_of(spec, 4)
    for _ in range(2):
        stack.cache.put(key, blocks)
        stack.cache.flush(10)
    stack.cache.get(key, torch.zeros_like(blocks))
    assert stack.stack.settled.covers(key.digests)
    touched = {name: len(backend.touched) for name, backend in stack.backends.items()}

    stack.cache.get(key, torch.zeros_like(blocks))
    assert {name: len(backend.touched) for name, backend in stack.backends.items()} == touched

    stack.cache.delete(key)
    assert not stack.stack.settled.covers(key.digests)


# -- repair


@pytest.mark.parametrize("l1", [OFF, {"capacity": "8MiB"}], ids=["no L1", "L1"])
@pytest.mark.parametrize("admit", ["all", "hot"])
@pytest.mark.parametrize("kind", [PooledCounting, doubles.CountingBackend])
def test_a_damaged_copy_is_replaced_by_the_one_from_below(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey, l1: dict[str, Any], admit: str, kind: Callable[[], Any]
) -> None:
    stack = layers(l1, upper=(kind(), {"admit": admit}), lower=kind())
    key, blocks = make_key(5), blocks_of(spec, 5)
    for _ in range(2):
        stack.cache.put(key, blocks)
        stack.cache.flush(10)
    assert stack.leads("upper", key) == 5
    if stack.stack.l1 is not None:
        stack.l1.clear()
    stack.stack.forget()
    damage(stack, "upper", key.digests[2])
    out = torch.zeros_like(blocks)

    assert stack.cache.get(key, out) == 5
    stack.cache.flush(10)

    assert same_bytes(out, blocks)
    assert stack.counters("upper").corrupt == 1
    assert stack.counters("upper").repaired == 1
    assert stack.counters("lower").repaired == 0
    assert stack.leads("upper", key) == 5
    stack.drop("lower", key.digests)
    if stack.stack.l1 is not None:
        stack.l1.clear()
    out.zero_()
    assert stack.cache.get(key, out) == 5
    assert same_bytes(out, blocks)


def test_get_each_repairs_too(layers: OpenLayers, spec: BlockSpec, make_key: MakeKey) -> None:
    stack = layers(OFF, upper=PooledCounting(), lower=PooledCounting())
    key, blocks = make_key(5), blocks_of(spec, 5)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    damage(stack, "upper", key.digests[3])

    assert stack.cache.get_each(key, torch.zeros_like(blocks)) == [BlockStatus.DELIVERED] * 5
    stack.cache.flush(10)

    assert stack.counters("upper").repaired == 1


def test_a_damaged_copy_that_nobody_can_replace_is_gone(layers: OpenLayers, spec: BlockSpec, make_key: MakeKey) -> None:
    stack = layers(OFF, upper=PooledCounting(), lower=PooledCounting())
    key, blocks = make_key(3), blocks_of(spec, 3)
    stack.cache.put(key, blocks)
    stack.cache.flush(10)
    stack.drop("lower", key.digests)
    damage(stack, "upper", key.digests[1])

    assert stack.cache.get(key, torch.zeros_like(blocks)) == 1
    stack.cache.flush(10)

    assert stack.holds("upper", key) == [True, False, True]
    assert stack.counters("upper").repaired == 0


# -- order of ages


@pytest.mark.parametrize("l1", [OFF, {"capacity": "16MiB"}], ids=["no L1", "L1"])
@pytest.mark.parametrize("already", [0, 10, 45])
def test_a_put_of_many_batches_leaves_its_head_as_the_youngest(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey, l1: dict[str, Any], already: int
) -> None:
    stack = layers(l1, tier=(doubles.CountingBackend(), {"queue": 100 * spec.nbytes}))
    key, blocks = make_key(80), blocks_of(spec, 80)
    if already:
        stack.cache.put(key[:already], blocks[:already])
        stack.cache.flush(10)

    stack.cache.put(key, blocks)
    stack.cache.flush(10)

    oldest_first = [name[17:] for name in stack.backends["tier"]._records]
    assert oldest_first == list(key.digests)[::-1]


def test_eviction_shortens_prefixes_instead_of_beheading_them(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey
) -> None:
    capacity = 100 * (spec.nbytes + 1024)
    stack = layers(
        {"capacity": "16MiB"}, tier=(doubles.CountingBackend(), {"capacity": capacity, "queue": 200 * spec.nbytes})
    )
    keys = [make_key(70, seed=seed) for seed in range(2)]
    for seed, key in enumerate(keys):
        stack.cache.put(key, blocks_of(spec, 70, seed=seed))
        stack.cache.flush(10)

    for key in keys:
        held = stack.holds("tier", key)
        assert held == sorted(held, reverse=True), "a hole before the end"
    assert stack.leads("tier", keys[1]) == 70
    assert 20 <= stack.leads("tier", keys[0]) < 70


def test_blocks_that_follow_a_prompt_one_by_one_stay_older_than_it(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey
) -> None:
    stack = layers({"capacity": "16MiB"}, tier=doubles.CountingBackend())
    assert stack.cache._state is not None
    stack.cache._state.writes._fresh = FreshChains(every_s=0.0)
    key, blocks = make_key(40), blocks_of(spec, 40)
    stack.cache.put(key[:30], blocks[:30])
    for i in range(30, 40):
        stack.cache.put(key[i : i + 1], blocks[i : i + 1])
        stack.cache.flush(10)

    newest_last = list(key.digests)[::-1]
    assert [name[17:] for name in stack.backends["tier"]._records] == newest_last
    assert list(stack.l1._index.policy) == newest_last
    assert stack.l1.ancestors(key.digests[-1]) == list(key.digests)


def test_the_blocks_before_are_refreshed_now_and_then_only() -> None:
    chains = FreshChains(every_s=3600.0)
    assert not chains.due(None, b"prompt")  # a put from the first block on
    assert not chains.due(b"prompt", b"1")
    assert not chains.due(b"1", b"2")
    assert chains.due(b"unknown", b"x")
    assert not chains.due(b"x", b"y")


# -- tiers on their own


class GatedCounting(doubles.CountingBackend):
    """Stores only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        self.gate.wait(30)
        return super().put_many(items, call)


@pytest.fixture
def gated() -> Iterator[GatedCounting]:
    backend = GatedCounting()
    yield backend
    backend.gate.set()


@pytest.mark.parametrize("l1", [OFF, {"capacity": "16MiB"}], ids=["no L1", "L1"])
def test_a_full_queue_of_one_tier_refuses_for_that_tier_alone(
    layers: OpenLayers, spec: BlockSpec, make_key: MakeKey, gated: GatedCounting, l1: dict[str, Any]
) -> None:
    stack = layers(
        l1, stuck=(gated, {"queue": 5 * spec.nbytes}), free=(doubles.CountingBackend(), {"queue": 100 * spec.nbytes})
    )
    key, blocks = make_key(20), blocks_of(spec, 20)

    assert stack.cache.put(key, blocks) == 20
    free = next(t for t in stack.stack.tiers if t.tier.name == "free")
    assert free.writer.flush(10)

    assert stack.leads("free", key) == 20
    assert stack.counters("stuck").refused_queue_full == 15
    assert stack.cache.get(key, torch.zeros_like(blocks)) == 20  # loads do not wait for stores
    gated.gate.set()
    stack.cache.flush(10)
    assert stack.leads("stuck", key) == 5


@pytest.mark.parametrize("l1", [OFF, {"capacity": "16MiB"}], ids=["no L1", "L1"])
def test_eviction_in_lmdb_orphans_nothing(
    spec: BlockSpec, tmp_path: Path, make_key: MakeKey, l1: dict[str, Any]
) -> None:
    tier = {"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "8MiB", "codec": "none", "queue": "16MiB"}
    namespace = Namespace(model="test/model", revision="r1")
    with KVCache.open({"l1": l1, "l2": [tier]}, spec=spec, namespace=namespace) as cache:
        for seed in range(8):
            key, blocks = make_key(70, seed=seed), blocks_of(spec, 70, seed=seed)
            cache.put(key[:50], blocks[:50])
            cache.put(key, blocks)
            cache.flush(10)
            assert cache.stats().tiers[0].orphaned_bytes == 0
        assert cache.stats().tiers[0].counters.evicted > 100
