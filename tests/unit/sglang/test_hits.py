"""How far a prefix can be restored when several pools have a say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstore_sglang.hits import ALL_PAGES, BLOCK_GROUPS, TRAILING_PAGES, PoolQuery, Restorable, restorable

KEYS = [f"k{i}" for i in range(12)]


def found(kv_pages: int, *queries: PoolQuery, stored: dict[str, set[str]]) -> Restorable:
    everything = stored | {"kv": set(KEYS[:kv_pages])}

    def each(name: str, keys: Sequence[str]) -> list[bool]:
        return [key in everything.get(name, set()) for key in keys]

    def count(name: str, keys: Sequence[str]) -> int:
        flags = each(name, keys)
        return flags.index(False) if False in flags else len(flags)

    return restorable(KEYS, queries, kv="kv", count=count, each=each)


def test_kv_alone_restores_every_length_up_to_its_first_hole() -> None:
    assert found(3, stored={}) == Restorable(3, {"kv": 3}, [1, 2, 3])


def test_nothing_is_restored_without_kv() -> None:
    query = PoolQuery("indexer", ALL_PAGES)
    assert found(0, query, stored={"indexer": set(KEYS)}) == Restorable(0, {}, [])


def test_a_pool_needed_for_all_pages_cuts_the_prefix_at_its_first_hole() -> None:
    stored = {"indexer": {*KEYS[:2], *KEYS[3:]}}
    expected = Restorable(2, {"kv": 5, "indexer": 2}, [1, 2])
    assert found(5, PoolQuery("indexer", ALL_PAGES), stored=stored) == expected


def test_a_state_restores_only_where_it_was_stored() -> None:
    query = PoolQuery("mamba", TRAILING_PAGES, ["any"])
    stored = {"mamba": {KEYS[1], KEYS[4]}}
    assert found(4, query, stored=stored) == Restorable(2, {"kv": 4, "mamba": 2}, [2])
    assert found(8, query, stored=stored) == Restorable(5, {"kv": 8, "mamba": 5}, [2, 5])


def test_a_window_has_to_be_complete_unless_the_prefix_is_shorter() -> None:
    query = PoolQuery("swa", TRAILING_PAGES, ["any"] * 3)
    stored = {"swa": {KEYS[0], KEYS[1], *KEYS[4:8]}}
    assert found(8, query, stored=stored).lengths == [1, 2, 7, 8]


def test_pools_that_never_agree_restore_nothing() -> None:
    queries = [PoolQuery("mamba", TRAILING_PAGES, ["any"]), PoolQuery("swa", TRAILING_PAGES, ["any"])]
    stored = {"mamba": {KEYS[1]}, "swa": {KEYS[2]}}
    assert found(4, *queries, stored=stored) == Restorable(0, {"kv": 4, "mamba": 2, "swa": 3}, [])


def test_an_unknown_policy_restores_nothing() -> None:
    assert found(4, PoolQuery("new", "some_pages"), stored={"new": set(KEYS)}).kv_pages == 0


@pytest.mark.parametrize(("groups", "covered"), [(0, 0), (1, 4), (2, 8), (3, 12)])
def test_whole_groups_cover_their_blocks_and_limit_nothing(groups: int, covered: int) -> None:
    names = [f"c{i}" for i in range(6)]  # two keys a group, four pages a block
    query = PoolQuery("compressed", BLOCK_GROUPS, names, block_pages=4, group_pages=2)
    answer = found(12, query, stored={"compressed": set(names[: 2 * groups + 1])})
    assert answer.kv_pages == 12
    assert answer.by_pool.get("compressed", 0) == covered


def test_groups_without_names_are_named_by_the_last_pages_of_their_block() -> None:
    query = PoolQuery("compressed", BLOCK_GROUPS, (), block_pages=4, group_pages=1)
    assert found(10, query, stored={"compressed": {KEYS[3], KEYS[7]}}).by_pool["compressed"] == 8


def test_groups_without_geometry_cover_nothing() -> None:
    assert found(4, PoolQuery("compressed", BLOCK_GROUPS, ["c"]), stored={"compressed": {"c"}}).by_pool == {"kv": 4}


@given(kv_pages=st.integers(0, 12), stored=st.sets(st.sampled_from(KEYS)), window=st.integers(1, 5))
def test_a_length_is_legal_exactly_when_its_window_is_stored(kv_pages: int, stored: set[str], window: int) -> None:
    answer = found(kv_pages, PoolQuery("swa", TRAILING_PAGES, ["any"] * window), stored={"swa": stored})
    expected = [n for n in range(1, kv_pages + 1) if set(KEYS[max(0, n - window) : n]) <= stored]
    assert answer.lengths == expected
    assert answer.kv_pages == max(expected, default=0)
