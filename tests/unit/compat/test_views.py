"""Views of tokens and hashes: cheap slices, exact equality, keys that are never stale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compat.aibrix import BlockHashes, KVCacheKey, TokenListView
from kvstore.compat.aibrix.addressing import address
from tests.unit.compat.rig import BLOCK_TOKENS, KINDS, ids_of


def digests(prefix: Any, query: Any, *, chained: bool = True) -> tuple[bytes, ...]:
    return address(prefix, query, BLOCK_TOKENS, chained=chained).key().digests


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_a_slice_is_the_slice(kind: str) -> None:
    whole = ids_of(kind, 8)
    assert whole[8:28][4:12] == whole[12:20]
    assert (len(whole[8:]), len(whole[:100]), len(whole[20:12])) == (24, 32, 0)
    assert whole[:8] + whole[8:] == whole
    assert list(whole[8:12]) == list(whole)[8:12] if kind == "tokens" else list(whole)[2:3]


@pytest.mark.parametrize("kind", KINDS)
def test_views_are_equal_by_all_that_they_hold(kind: str) -> None:
    whole, again, other = ids_of(kind, 4), ids_of(kind, 4), ids_of(kind, 4, seed=1)
    assert whole == again
    assert hash(whole) == hash(again)
    assert whole[:8] != whole[8:]
    assert whole != other
    assert whole != "text"
    assert whole[:0] == other[:0]
    assert len({whole, again, other}) == 2


def test_hashes_are_not_equal_because_their_last_one_is() -> None:
    assert BlockHashes(["p1", "p2", "x"], 4) != BlockHashes(["q1", "q2", "x"], 4)
    assert BlockHashes(["x"], 4) != BlockHashes(["x"], 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_its_prefix_and_its_query(kind: str) -> None:
    whole = ids_of(kind, 4)
    assert KVCacheKey(whole[:4], whole[4:]) == KVCacheKey(ids_of(kind, 1), ids_of(kind, 4)[4:])
    assert KVCacheKey(None, whole) == KVCacheKey(whole[:0], whole)
    assert hash(KVCacheKey(None, whole)) == hash(KVCacheKey(whole[:0], whole))
    assert KVCacheKey(whole[:4], whole[4:]) != KVCacheKey(whole[:8], whole[8:])
    assert KVCacheKey(None, whole) != KVCacheKey(whole[:4], whole[4:])
    assert len(KVCacheKey(whole[:4], whole[4:12])) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_caller_changes_later_changes_no_key(kind: str) -> None:
    data: Any = list(range(16)) if kind == "tokens" else ["a", "b", "c", "d"]
    query = TokenListView(data) if kind == "tokens" else BlockHashes(data, BLOCK_TOKENS)
    before = digests(None, query)
    data[0] = data[-1]
    assert digests(None, query) == before
    assert digests(query[:4], query[4:]) == before[1:]


def test_an_array_of_the_caller_is_copied_and_ours_is_read_only() -> None:
    data = np.arange(16, dtype=np.int64)
    query = TokenListView(data)
    data[:] = 0
    assert query.to_numpy().tolist() == list(range(16))
    with pytest.raises(ValueError, match="read-only"):
        query.to_numpy()[0] = 1
    assert query.memoryview().readonly
    assert TokenListView(np.arange(16, dtype=np.uint16)) == query == TokenListView.from_numpy(np.arange(16))
    assert hash(TokenListView(np.arange(16, dtype=np.uint16))) == hash(query)


@pytest.mark.parametrize("kind", KINDS)
def test_digests_do_not_depend_on_how_a_sequence_was_asked_for(kind: str) -> None:
    expected = digests(None, ids_of(kind, 9))
    grown = ids_of(kind, 9)
    for stop in range(1, 10):  # block by block, then from the cache
        assert digests(grown[: (stop - 1) * 4], grown[(stop - 1) * 4 : stop * 4]) == expected[stop - 1 : stop]
    assert digests(None, grown) == expected
    assert digests(ids_of(kind, 9)[:12], grown[12:]) == expected[3:]  # prefix from another object


@pytest.mark.parametrize("kind", KINDS)
def test_each_block_is_hashed_once_for_all_views(kind: str) -> None:
    query = ids_of(kind, 8)
    wanted = address(None, query, BLOCK_TOKENS, chained=True)
    assert wanted.hashed == 0
    key = wanted.key()
    assert address(query[:8], query[8:], BLOCK_TOKENS, chained=True).hashed == 6
    assert address(None, query[:16], BLOCK_TOKENS, chained=True).key()[0] is key[0]


def test_hashes_that_stand_alone_are_found_without_their_prefix() -> None:
    query = ids_of("hashes", 4)
    assert digests(None, query[8:]) == digests(query[:8], query[8:]) == digests(None, query)[2:]


def test_hashes_of_content_are_another_block_behind_another_prefix() -> None:
    a, b = BlockHashes(["p", "x"], 4), BlockHashes(["q", "x"], 4)
    assert digests(None, a, chained=False)[1] != digests(None, b, chained=False)[1]
    assert digests(a[:4], a[4:], chained=False) == digests(None, a, chained=False)[1:]
    assert digests(None, BlockHashes(["x", "x"], 4), chained=False)  # content may repeat


def test_a_hash_that_stands_twice_in_a_sequence_cannot_stand_alone() -> None:
    with pytest.raises(ValueError, match='block_hashes="content"'):
        digests(None, BlockHashes(["x", "y", "x"], 4))
    with pytest.raises(ValueError, match="twice"):
        digests(BlockHashes(["x"], 4), BlockHashes(["y", "x"], 4))


def test_tokens_that_no_vocabulary_has_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        digests(None, TokenListView([1, 2, 3, -1]))
    with pytest.raises(OverflowError):
        TokenListView([1 << 40])
    with pytest.raises(TypeError, match="float64"):
        TokenListView(np.ones(4))
    with pytest.raises(ValueError, match="one dimension"):
        TokenListView(np.ones((2, 2), dtype=np.int32))


def test_bounds_of_a_view_may_be_negative_or_beyond() -> None:
    assert list(TokenListView(list(range(8)), -3)) == [5, 6, 7]
    assert list(TokenListView(list(range(8)), 2, -2)) == [2, 3, 4, 5]
    assert list(TokenListView(list(range(8)), 6, 99)) == [6, 7]
    view = TokenListView(list(range(8)))[2:6]
    assert (view[0], view[-1], view.nbytes(), TokenListView.calculate_size(4)) == (2, 5, 16, 16)
    with pytest.raises(IndexError):
        view[4]
    with pytest.raises(ValueError, match="expected 1"):
        view[::2]


def test_hashes_are_cut_at_blocks_only() -> None:
    query = ids_of("hashes", 4)
    assert query[1] == list(query)[1]
    assert list(query[::8]) == list(query)[::2]
    for bad in (slice(2, None), slice(None, 6), slice(None, None, 6)):
        with pytest.raises(ValueError, match="whole blocks of 4"):
            query[bad]
    with pytest.raises(TypeError, match="list of str"):
        BlockHashes([b"x"], 4)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="list of str"):
        BlockHashes("text", 4)
    with pytest.raises(ValueError, match="at least 1"):
        BlockHashes(["x"], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_different_sequences_are_joined_in_the_order_given(kind: str) -> None:
    a, b = ids_of(kind, 2), ids_of(kind, 2, seed=1)
    assert list(a + b) == list(a) + list(b)
    assert list(a[4:] + a[:4]) == list(a[4:]) + list(a[:4])
    with pytest.raises(TypeError, match="cannot append"):
        a + [1]  # noqa: RUF005 - the operator is what is tested
    if kind == "hashes":
        with pytest.raises(ValueError, match="blocks of 8"):
            a + BlockHashes(["x"], 8)
