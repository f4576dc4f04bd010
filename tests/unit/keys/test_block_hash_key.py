"""Block-hash keys: stand-alone and chained hashes."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KeyMismatchError
from kvstore.keys import BlockHashKey, KVCacheKey

hashes = st.lists(st.binary(max_size=4) | st.text(max_size=4) | st.integers(-300, 300), max_size=10)
both_modes = pytest.mark.parametrize("chained", [True, False])


class Pool(enum.StrEnum):
    MAMBA = "mamba"


def key(query: Any, *, chained: bool = True, **arguments: Any) -> BlockHashKey:
    return KVCacheKey.from_block_hashes(query, **{"block_tokens": 16, "chained": chained, **arguments})


@both_modes
def test_key_has_a_block_per_hash(chained: bool) -> None:
    k = key([b"a", "b", 3], chained=chained)

    assert type(k) is BlockHashKey
    assert (len(k), k.n_tokens, k.block_tokens, k.kind, k.chained) == (3, 48, 16, 2, chained)
    assert all(len(d) == 32 for d in k)


@given(hashes, hashes, st.booleans())
def test_query_with_prefix_is_the_suffix_of_the_whole(p: list[Any], q: list[Any], chained: bool) -> None:
    expected = key(p + q, chained=chained).suffix(len(p))

    for prefix in (p, key(p, chained=chained)):
        part = key(q, chained=chained, prefix=prefix)

        assert part == expected
        assert (part.digests, part.parent, part.start_block) == (
            expected.digests,
            expected.parent,
            expected.start_block,
        )


@given(hashes, st.data())
def test_stand_alone_suffix_is_the_key_of_the_remaining_hashes(h: list[Any], data: st.DataObject) -> None:
    n = data.draw(st.integers(0, len(h)))

    assert key(h).suffix(n) == key(h[n:])
    assert hash(key(h).suffix(n)) == hash(key(h[n:]))


def test_chained_here_means_equal_content_behind_another_prefix_is_another_block() -> None:
    a, b = key(["p1", "X"], chained=False), key(["p2", "X"], chained=False)

    assert a != b
    assert a[1] != b[1]
    assert key(["X"], chained=False)[0] not in (a[1], b[1])


def test_stand_alone_hash_is_one_block_behind_any_prefix() -> None:
    assert key(["p1", "X"])[1] == key(["p2", "X"])[1] == key(["X"])[0]
    assert key(["p1", "X"]) != key(["p2", "X"])


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("alike", [[b"a1", b"b2"], ["a1", "b2"], ["\xe4", "b"], ["a\udc80", "bb"], [b"", b""]])
def test_hashes_that_are_alike_have_the_digests_they_have_among_others(alike: list[Any], chained: bool) -> None:
    mixed = KVCacheKey.from_block_hashes([*alike, 7, "another length"], block_tokens=16, chained=chained)
    assert KVCacheKey.from_block_hashes(alike, block_tokens=16, chained=chained).digests == mixed.digests[:2]


def test_stand_alone_and_chained_hashes_are_different_blocks() -> None:
    assert not set(key(["a", "b"])) & set(key(["a", "b"], chained=False))


def test_position_of_stand_alone_hashes_is_known_only_with_a_prefix() -> None:
    unknown = key(["a", "b", "c"])
    assert (unknown.position_known, unknown.parent, unknown.start_block) == (False, None, 0)
    assert (unknown.suffix(2).position_known, unknown.suffix(2).parent) == (False, unknown[1])

    starts: list[Any] = [[], key([], prefix=[])]
    for prefix in starts:
        first = key(["a"], prefix=prefix)
        assert (first.position_known, first.parent, first.start_block) == (True, None, 0)
    later = key(["c"], prefix=["a", "b"])
    assert (later.position_known, later.parent, later.start_block) == (True, unknown[1], 2)
    assert later == unknown.suffix(2)
    assert not key(["d"], prefix=unknown).position_known


def test_position_of_hashes_chained_here_is_always_known() -> None:
    k = key(["a", "b"], chained=False)

    assert (k.position_known, k.parent, k.start_block) == (True, None, 0)


@both_modes
def test_equal_bytes_are_one_hash_and_other_types_are_others(chained: bool) -> None:
    like = [key([v], chained=chained) for v in (b"61", bytearray(b"61"), memoryview(b"61"), np.bytes_(b"61"))]
    other = [key([v], chained=chained) for v in ("61", 61, b"61\0", "061", -61, b"6", b"1", 0x61, "a")]

    assert len(set(like)) == 1
    assert len({*like, *other}) == 1 + len(other)


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, lambda v: [np.int64(x) for x in v]])
def test_integer_hashes_may_come_in_any_container(make: Any) -> None:
    values = [5, -(2**63), 2**63 - 1, 0]

    assert key(make(values)) == key(values)


def test_long_hashes_that_differ_in_one_place_are_different() -> None:
    base = "ab" * 32
    near = [base, base[:-1] + "c", "c" + base[1:], base[:-4], base + "0"]

    assert len({key([h])[0] for h in near}) == len(near)
    assert key([2**4096])[0] != key([2**4096 + 1])[0]


@both_modes
@pytest.mark.parametrize("bad", [None, True, 1.5, Pool.MAMBA, (), np.bool_(1), np.zeros(2, np.uint8)])
def test_what_is_no_hash_is_named_with_its_index(bad: Any, chained: bool) -> None:
    with pytest.raises(TypeError, match=r"block hash 1.*expected bytes, str or int"):
        key(["a", bad], chained=chained)


@pytest.mark.parametrize("bad", ["ab", b"ab", bytearray(b"ab"), 5, {"a"}, None, iter(["a"])])
def test_what_is_no_sequence_of_hashes_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"query is of type .*; expected a sequence of block hashes"):
        key(bad)


def test_fixed_width_text_array_is_refused_because_it_drops_nuls() -> None:
    with pytest.raises(TypeError, match="prefix is a numpy array of fixed-width text, which drops trailing NULs"):
        key([b"a"], prefix=np.array([b"ab\0"]))


def test_key_is_no_sequence_of_engine_hashes() -> None:
    with pytest.raises(TypeError, match="query is a key already"):
        key(key(["a"]))


@pytest.mark.parametrize("chained", [None, 1, "yes"])
def test_chained_must_be_said(chained: Any) -> None:
    with pytest.raises(TypeError, match=r"chained is .*; expected True .* or False"):
        key(["a"], chained=chained)
    with pytest.raises(TypeError, match="chained"):
        KVCacheKey.from_block_hashes(["a"], block_tokens=16)  # type: ignore[call-arg]  # the point of the test


@both_modes
def test_prefix_key_passes_on_salt_adapter_and_group(chained: bool) -> None:
    names: dict[str, Any] = {"chained": chained, "salt": b"t", "adapter": "lora@1", "group": 2}

    assert key(["c"], chained=chained, prefix=key(["a", "b"], **names)) == key(["a", "b", "c"], **names).suffix(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chained": False}, "chained differs from the prefix key's: False instead of True"),
        ({"salt": "x"}, "^salt differs from the prefix key's$"),
        ({"adapter": "x"}, "adapter differs"),
        ({"group": 1}, "group differs from the prefix key's: 1 instead of 0"),
        ({"block_tokens": 32}, "block_tokens differs from the prefix key's: 32 instead of 16"),
    ],
)
def test_prefix_key_of_another_identity_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KeyMismatchError, match=message):
        key(["b"], prefix=key(["a"]), **change)


def test_prefix_key_of_the_other_kind_is_refused() -> None:
    with pytest.raises(KeyMismatchError, match="prefix is a token key; expected a block-hash key"):
        key(["a"], prefix=KVCacheKey.from_tokens(range(16), block_tokens=16))
