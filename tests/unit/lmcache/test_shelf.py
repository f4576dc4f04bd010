"""Whole chunks and shorter ones side by side."""

from __future__ import annotations

import logging

import pytest
import torch
from kvstore_lmcache.layout import ChunkLayout
from kvstore_lmcache.shelf import ChunkShelf
from kvstore_lmcache.stores import Stores

from tests.unit.lmcache.conftest import LAYOUT, OpenStores, names, noise

SHORT = ChunkLayout.of([(2, 3, 5, 32)], [torch.bfloat16], "KV_2LTD")
LONG = ChunkLayout.of([(2, 3, 17, 32)], [torch.bfloat16], "KV_2LTD")


class Memory:
    """Allocates as LMCache does, and remembers what was given out."""

    def __init__(self, room: int = 100) -> None:
        self.given: dict[int, torch.Tensor] = {}
        self.layouts: list[ChunkLayout] = []
        self._room = room

    def __call__(self, i: int, layout: ChunkLayout) -> torch.Tensor | None:
        if len(self.layouts) == self._room:
            return None
        self.layouts.append(layout)
        self.given[i] = torch.zeros(layout.nbytes, dtype=torch.uint8)
        return self.given[i]


def shelf_of(stores: Stores, *, partial: bool = True) -> ChunkShelf:
    return ChunkShelf(stores, "m", LAYOUT, chunk_tokens=16, partial=partial)


def bytes_for(layout: ChunkLayout, seed: int) -> tuple[ChunkLayout, torch.Tensor]:
    return layout, noise(layout.nbytes, seed)


def test_whole_chunks_and_a_short_last_one_come_back_as_they_were(open_stores: OpenStores) -> None:
    stores = open_stores()
    shelf, memory = shelf_of(stores), Memory()

    stored = shelf.put(names(1, 2, 3), [bytes_for(LAYOUT, 1), bytes_for(LAYOUT, 2), bytes_for(SHORT, 3)])
    got = shelf.get(names(1, 2, 3, 4), memory)

    assert stored == 3
    assert got == [LAYOUT, LAYOUT, SHORT, None]
    for i, (layout, seed) in enumerate([(LAYOUT, 1), (LAYOUT, 2), (SHORT, 3)]):
        assert torch.equal(memory.given[i], noise(layout.nbytes, seed))
    assert (stores.counters.loaded, stores.counters.missed) == (3, 1)


def test_leading_counts_to_the_first_hole_whatever_the_sizes(open_stores: OpenStores) -> None:
    shelf = shelf_of(open_stores())
    shelf.put(names(1, 3), [bytes_for(LAYOUT, 1), bytes_for(LAYOUT, 3)])
    shelf.put(names(2), [bytes_for(SHORT, 2)])

    assert [shelf.leading(names(*asked)) for asked in ([1, 2, 3], [1, 2, 3, 4, 1], [4, 1], [2], [])] == [3, 3, 0, 1, 0]


def test_without_partial_chunks_a_short_one_is_counted_and_said_once(
    open_stores: OpenStores, caplog: pytest.LogCaptureFixture
) -> None:
    stores = open_stores()
    shelf = shelf_of(stores, partial=False)
    caplog.set_level(logging.WARNING, "kvstore.lmcache")

    assert [shelf.put(names(i), [bytes_for(SHORT, i)]) for i in (1, 2)] == [0, 0]
    assert shelf.leading(names(1)) == 0
    assert stores.counters.unfit == 2
    assert sum("needs save_unfull_chunk" in record.message for record in caplog.records) == 1


def test_a_chunk_larger_than_a_whole_one_is_refused(open_stores: OpenStores) -> None:
    stores = open_stores()

    assert shelf_of(stores).put(names(1, 2), [bytes_for(LONG, 1), bytes_for(LAYOUT, 2)]) == 1
    assert stores.counters.unfit == 1


def test_what_does_not_fit_in_memory_is_a_miss_from_there_on(open_stores: OpenStores) -> None:
    shelf = shelf_of(open_stores())
    shelf.put(names(1, 2, 3), [bytes_for(LAYOUT, i) for i in (1, 2, 3)])

    assert shelf.get(names(1, 2, 3), Memory(room=2)) == [LAYOUT, LAYOUT, None]


def test_a_short_chunk_for_which_there_is_no_memory_is_a_miss(open_stores: OpenStores) -> None:
    shelf = shelf_of(open_stores())
    shelf.put(names(1), [bytes_for(SHORT, 1)])

    assert shelf.get(names(1), Memory(room=1)) == [None]


def test_deleting_finds_chunks_of_either_kind(open_stores: OpenStores) -> None:
    shelf = shelf_of(open_stores())
    shelf.put(names(1, 2), [bytes_for(LAYOUT, 1), bytes_for(SHORT, 2)])

    assert [shelf.delete(name) for name in names(1, 2, 3)] == [True, True, False]
    assert shelf.leading(names(1)) == shelf.leading(names(2)) == 0
