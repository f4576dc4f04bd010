"""Chunks of one size: what is delivered is what was put, and everything else is a miss with a count."""

from __future__ import annotations

import logging

import pytest
import torch
from kvstore_lmcache.layout import ChunkForm
from kvstore_lmcache.store import ChunkStore
from kvstore_lmcache.stores import Stores

from kvstore import BlockSpec
from kvstore.errors import BackendUnavailableError
from kvstore.memory_backend import MemoryBackend
from kvstore.testing import FaultyBackend, HangingBackend, LyingBackend
from kvstore.types import PutStatus
from tests.unit.lmcache.conftest import OpenStores, names, noise

NBYTES = 8192
FORM = ChunkForm(BlockSpec.opaque(NBYTES, block_tokens=16, tag="test"), "test")


def opened(stores: Stores) -> ChunkStore:
    return stores.open("m", FORM)


def chunks(*seeds: int) -> list[torch.Tensor]:
    return [noise(NBYTES, seed) for seed in seeds]


def empty(count: int) -> list[torch.Tensor]:
    return [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(count)]


@pytest.mark.parametrize("l1", [None, {"capacity": "1MiB"}])
def test_what_is_put_is_found_and_delivered_at_once(open_stores: OpenStores, l1: dict[str, str] | None) -> None:
    store = opened(open_stores(l1=l1))
    out = empty(3)

    stored = store.put(names(1, 2), chunks(1, 2))

    assert stored == [True, True]
    assert store.contains(names(2, 3, 1)) == [True, False, True]
    assert store.get(names(1, 3, 2), out) == [True, False, True]
    assert torch.equal(out[0], noise(NBYTES, 1))
    assert not out[1].any()
    assert torch.equal(out[2], noise(NBYTES, 2))


def test_chunks_of_another_salt_or_group_are_other_chunks(open_stores: OpenStores) -> None:
    store = opened(open_stores())
    mixed = [*names(1), *names(1, salt="a"), *names(1, group=1)]

    store.put(mixed[:2], chunks(1, 2))

    assert store.contains(mixed) == [True, True, False]
    out = empty(2)
    assert store.get(mixed[:2], out) == [True, True]
    assert torch.equal(out[1], noise(NBYTES, 2))


def test_a_salt_of_the_options_separates_from_the_same_salt_of_a_chunk(open_stores: OpenStores) -> None:
    medium = MemoryBackend()
    with_option = opened(open_stores(medium, salt="a"))
    without = opened(open_stores(medium))

    with_option.put(names(1), chunks(1))

    assert with_option.contains(names(1)) == [True]
    assert without.contains([*names(1), *names(1, salt="a")]) == [False, False]


def test_deleted_chunks_are_gone(open_stores: OpenStores) -> None:
    store = opened(open_stores())
    store.put(names(1, 2), chunks(1, 2))

    assert store.delete(names(1, 3)) == 1
    assert store.contains(names(1, 2)) == [False, True]


def test_a_put_needs_no_more_room_in_the_queue_than_a_chunk(open_stores: OpenStores) -> None:
    stores = open_stores()
    store = opened(stores)
    many = range(64)

    assert all(store.put(names(*many), chunks(*many)))
    assert stores.counters.stored == 64


def test_a_tier_that_cannot_store_is_a_refusal(open_stores: OpenStores, caplog: pytest.LogCaptureFixture) -> None:
    stores = open_stores(FaultyBackend(MemoryBackend(), put_many=PutStatus.FULL))
    store = opened(stores)
    caplog.set_level(logging.WARNING, "kvstore.lmcache")

    assert store.put(names(1, 2), chunks(1, 2)) == [False, False]
    assert store.put(names(1, 2), chunks(1, 2)) == [False, False]
    assert stores.counters.refused == 4
    assert [record.message for record in caplog.records if record.name == "kvstore.lmcache"] == [
        "2 of 2 chunks were not stored within 30s; the tiers' counters and log lines tell why"
    ]


def test_a_tier_that_fails_is_a_miss(open_stores: OpenStores) -> None:
    broken = BackendUnavailableError("away")
    medium = FaultyBackend(MemoryBackend(), get_many=broken, exists_many=broken)
    medium.failing = False
    store = opened(open_stores(medium))
    store.put(names(1), chunks(1))
    medium.failing = True
    out = empty(1)

    assert store.contains(names(1)) == [False]
    assert store.get(names(1), out) == [False]
    assert not out[0].any()


def test_a_tier_that_delivers_nothing_is_a_miss(open_stores: OpenStores) -> None:
    out = empty(2)

    assert opened(open_stores(LyingBackend(MemoryBackend()))).get(names(1, 2), out) == [False, False]
    assert not out[0].any()


def test_a_put_that_hangs_ends_with_its_time(open_stores: OpenStores) -> None:
    medium = HangingBackend(MemoryBackend(), ("put_many",))
    stores = open_stores(medium, put_timeout=0.2)
    store = opened(stores)
    try:
        assert store.put(names(1), chunks(1)) == [False]
    finally:
        medium.release()

    assert stores.counters.late == 1


def test_calls_after_the_end_are_misses(open_stores: OpenStores) -> None:
    stores = open_stores()
    store = opened(stores)
    store.put(names(1), chunks(1))
    stores.close()

    assert store.contains(names(1)) == [False]
    assert store.get(names(1), empty(1)) == [False]
    assert store.put(names(2), chunks(2)) == [False]
    assert store.delete(names(1)) == 0
    assert stores.counters.failed > 0


def test_a_model_is_opened_once_for_each_form(open_stores: OpenStores) -> None:
    stores = open_stores()
    other = ChunkForm(BlockSpec.opaque(100, block_tokens=16, tag="test"), "test")

    assert stores.find("m", FORM) is stores.open("m", FORM)
    assert stores.open("m", other) is not stores.open("m", FORM)
    assert [store.chunk_bytes for store in stores.opened("m")] == [NBYTES, 100]
    assert stores.opened("n") == []


def test_closed_stores_open_nothing(open_stores: OpenStores) -> None:
    stores = open_stores()
    stores.close()

    assert stores.find("m", FORM) is None


def test_a_store_that_cannot_be_opened_is_not_tried_again_at_once(
    open_stores: OpenStores, caplog: pytest.LogCaptureFixture
) -> None:
    medium = FaultyBackend(MemoryBackend(), open=BackendUnavailableError("away"))
    stores = open_stores(medium)

    assert stores.find("m", FORM) is None
    medium.failing = False
    assert stores.find("m", FORM) is None
    assert sum("no store for m" in record.message for record in caplog.records) == 1
    medium.failing = True
    with pytest.raises(BackendUnavailableError, match="away"):
        stores.probe()
