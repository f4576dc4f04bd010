"""What both kinds share: sequence laws, slices, coarse keys, equality, copies."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KeyMismatchError
from kvstore.keys import BlockHashKey, KVCacheKey, TokenKey

Make = Callable[..., KVCacheKey]


def _tokens(n_blocks: int, **arguments: Any) -> KVCacheKey:
    return KVCacheKey.from_tokens(range(n_blocks * 4), **{"block_tokens": 4, **arguments})


def _alone(n_blocks: int, **arguments: Any) -> KVCacheKey:
    return KVCacheKey.from_block_hashes(range(n_blocks), **{"block_tokens": 4, "chained": True, **arguments})


def _chained(n_blocks: int, **arguments: Any) -> KVCacheKey:
    return KVCacheKey.from_block_hashes(range(n_blocks), **{"block_tokens": 4, "chained": False, **arguments})


KINDS: dict[str, tuple[Make, type[KVCacheKey]]] = {
    "tokens": (_tokens, TokenKey),
    "alone": (_alone, BlockHashKey),
    "chained": (_chained, BlockHashKey),
}
every_make = pytest.mark.parametrize("make", [make for make, _ in KINDS.values()], ids=KINDS.keys())
every_kind = pytest.mark.parametrize(("make", "kind"), KINDS.values(), ids=KINDS.keys())
any_make = st.sampled_from([make for make, _ in KINDS.values()])


@every_kind
def test_key_is_an_immutable_sequence_of_digests(make: Make, kind: type[KVCacheKey]) -> None:
    key = make(3)

    assert type(key) is kind
    assert isinstance(key, Sequence)
    assert tuple(key) == key.digests == (key[0], key[1], key[-1])
    assert key[1] in key
    assert key.index(key[2]) == 2
    assert list(reversed(key)) == [key[2], key[1], key[0]]
    with pytest.raises(IndexError):
        key[3]
    with pytest.raises(AttributeError):
        key.digests = ()  # type: ignore[misc]  # the point of the test


def test_key_without_a_kind_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        KVCacheKey(None, ())  # type: ignore[abstract,arg-type]  # the point of the test


@given(any_make, st.integers(0, 6), st.data())
def test_split_is_prefix_and_suffix_and_loses_nothing(make: Make, n: int, data: st.DataObject) -> None:
    key = make(n)
    at = data.draw(st.integers(0, n))
    prefix, suffix = key.split(at)

    assert prefix == key.prefix(at) == key[:at]
    assert suffix == key.suffix(at) == key[at:]
    assert prefix.digests + suffix.digests == key.digests
    assert (prefix.start_block, suffix.start_block) == (0, at)
    assert (prefix.parent, suffix.parent) == (None, key[at - 1] if at else None)
    assert type(prefix) is type(suffix) is type(key)


@given(any_make, st.integers(0, 6), st.slices(6))
def test_slice_is_the_run_of_those_blocks(make: Make, n: int, where: slice) -> None:
    key = make(n)
    if where.step not in (None, 1):
        with pytest.raises(ValueError, match=r"slice step is .*; expected 1"):
            key[where]
        return
    first, stop, _ = where.indices(n)

    assert key[where].digests == key.digests[where]
    assert key[where] == key.suffix(first).prefix(max(0, stop - first))


def test_open_slice_keeps_the_tail_and_closed_slice_drops_it() -> None:
    key = KVCacheKey.from_tokens(range(10), block_tokens=4)

    assert [k.n_tail_tokens for k in (key, key[1:], key[:], key.suffix(2), key.split(1)[1])] == [2] * 5
    assert [k.n_tail_tokens for k in (key[:2], key[:9], key.prefix(2), key.split(1)[0])] == [0] * 4
    assert bytes(key[1:2].tokens) == bytes(key.tokens[16:32])


@every_make
@pytest.mark.parametrize("n", [-1, 4])
def test_part_beyond_the_key_is_refused(make: Make, n: int) -> None:
    for part in (make(3).prefix, make(3).suffix, make(3).split):
        with pytest.raises(ValueError, match=f"n_blocks is {n}; expected 0 to 3"):
            part(n)


@every_kind
def test_coarse_key_has_a_block_per_whole_group(make: Make, kind: type[KVCacheKey]) -> None:
    key, coarse = make(7), make(7).coarsen(3)

    assert type(coarse) is kind
    assert (len(coarse), coarse.block_tokens, coarse.n_tokens) == (2, 12, 24)
    assert not set(coarse) & set(key)
    assert coarse == make(6).coarsen(3)
    assert coarse.prefix(1) == key.prefix(3).coarsen(3)
    assert coarse != make(7, block_tokens=12)
    assert not set(coarse) & set(make(7).coarsen(2))


@given(any_make, st.integers(1, 4), st.integers(0, 12), st.data())
def test_coarse_suffix_is_the_suffix_made_coarse(make: Make, k: int, n: int, data: st.DataObject) -> None:
    skip = data.draw(st.integers(0, n // k))
    expected, key = make(n).coarsen(k).suffix(skip), make(n).suffix(skip * k).coarsen(k)

    assert key == expected
    assert (key.parent, key.start_block, key.digests) == (expected.parent, expected.start_block, expected.digests)


def test_coarse_token_key_counts_blocks_left_over_as_tail() -> None:
    coarse = KVCacheKey.from_tokens(range(22), block_tokens=4).coarsen(2)

    assert (len(coarse), coarse.n_tokens, coarse.n_tail_tokens) == (2, 16, 6)
    assert memoryview(coarse.suffix(1).tokens).cast("I").tolist() == list(range(8, 16))


@every_make
def test_coarsen_by_one_is_the_key_itself(make: Make) -> None:
    assert make(3).coarsen(1) == make(3)


@every_make
def test_coarsen_refuses_what_has_no_whole_groups(make: Make) -> None:
    with pytest.raises(KeyMismatchError, match="starts at block 3; expected a multiple of 2 to coarsen by 2"):
        make(7).suffix(3).coarsen(2)
    with pytest.raises(KeyMismatchError, match="coarse already, by 2; coarsen the key it was made from, by 6"):
        make(7).coarsen(2).coarsen(3)
    with pytest.raises(ValueError, match="n_blocks is 0; expected 1 to"):
        make(7).coarsen(0)


def test_equality_is_about_blocks_not_about_tails_or_kinds_of_object() -> None:
    key = KVCacheKey.from_tokens(range(10), block_tokens=4)

    assert key == KVCacheKey.from_tokens(range(9), block_tokens=4)
    assert key != list(key)
    assert key != 3
    assert len({key, key[:], key.prefix(2), KVCacheKey.from_tokens(range(9), block_tokens=4)}) == 1


def test_empty_keys_are_equal_only_in_equal_scope() -> None:
    empties = [
        _tokens(0),
        _alone(0),
        _chained(0),
        _tokens(0, salt="a"),
        _tokens(0, group=1),
        _tokens(0, block_tokens=8),
    ]

    assert len(set(empties)) == len(empties)
    assert _tokens(0) == KVCacheKey.from_tokens([1, 2], block_tokens=4)


@every_kind
def test_copies_are_equal_keys(make: Make, kind: type[KVCacheKey]) -> None:
    key = make(5, salt="s").suffix(2)

    for twin in (copy.copy(key), copy.deepcopy(key), pickle.loads(pickle.dumps(key))):  # noqa: S301 - our own bytes
        assert twin == key
        assert type(twin) is kind
        assert (twin.parent, twin.start_block, twin.salt) == (key.parent, key.start_block, "s")


def test_token_ids_travel_with_the_key() -> None:
    key = KVCacheKey.from_tokens(range(11), block_tokens=4).suffix(1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        twin = pool.apply(copy.copy, (key,))

    assert (twin, bytes(twin.tokens), twin.n_tail_tokens) == (key, bytes(key.tokens), 3)


def test_repr_says_what_is_addressed_and_hides_the_salt() -> None:
    key = _tokens(3, salt="hunter2", adapter="lora@1", group=2).suffix(1)

    assert repr(key) == "<TokenKey: 2 blocks of 4 tokens, from block 1, group 2, adapter 'lora@1', salted>"
    assert repr(_alone(1)) == "<BlockHashKey: 1 blocks of 4 tokens, position unknown>"
