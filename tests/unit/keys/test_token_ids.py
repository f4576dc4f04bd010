"""Token containers: equal values are equal bytes; what is no token id is named with its index."""

from __future__ import annotations

import enum
import re
import subprocess
import sys
from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import KVCacheKey
from kvstore.keys.token_ids import token_bytes

IDS = [3, 0, 321, 65, 127, 9, 10, 11, 12]
WIDE = [0, 1, 2**31, 2**32 - 1]


class Token(enum.IntEnum):
    BOS = 1


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "array-i": lambda v: array("i", v),
    "array-Q": lambda v: array("Q", v),
    "list of numpy": lambda v: [np.int64(x) for x in v],
    "list of torch": lambda v: [torch.tensor(x) for x in v],
    "mixed": lambda v: [v[0], *(np.uint16(x) for x in v[1:])],
    **{f"numpy-{t}": (lambda v, t=t: np.array(v, dtype=t)) for t in ("i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">u8")},
    "numpy strided": lambda v: np.repeat(np.array(v), 3)[::3],
    "numpy reversed view": lambda v: np.array(v[::-1])[::-1],
    "numpy read only": lambda v: np.frombuffer(np.array(v).tobytes(), dtype=np.int64),
    **{
        f"torch-{t}": (lambda v, t=t: torch.tensor(v, dtype=getattr(torch, t)))
        for t in ("int16", "int32", "int64", "uint16", "uint32", "uint64")
    },
    "torch strided": lambda v: torch.tensor([v, v]).T[:, 0],
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_equal_values_are_one_key_whatever_the_container(container: Any) -> None:
    query = container(IDS)

    key = KVCacheKey.from_tokens(query, block_tokens=4)

    assert key == KVCacheKey.from_tokens(IDS, block_tokens=4)
    assert bytes(key.tokens) + bytes(key.tail_tokens) == array("I", IDS).tobytes()


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda v: array("L", v)])
def test_ids_reach_the_end_of_32_bits(make: Any) -> None:
    assert token_bytes(make(WIDE), "query") == bytes.fromhex("00000000 01000000 00000080 ffffffff")


def test_range_is_its_numbers() -> None:
    assert token_bytes(range(5, 300, 7), "query") == token_bytes(list(range(5, 300, 7)), "query")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_list_numpy_and_torch_agree(ids: list[int]) -> None:
    expected = token_bytes(ids, "query")

    assert token_bytes(np.array(ids, dtype=np.int64), "query") == expected
    assert token_bytes(torch.tensor(ids, dtype=torch.int64), "query") == expected


@pytest.mark.parametrize("empty", [[], (), range(0), np.array([]), torch.tensor([]), array("I")])
def test_nothing_is_no_tokens_whatever_the_dtype(empty: Any) -> None:
    assert token_bytes(empty, "query") == b""


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (-1, "-1 (int)"),
        (2**32, "4294967296 (int)"),
        (True, "True (bool)"),
        (np.True_, "True (bool)"),
        (torch.tensor(data=True), "True (bool)"),
        (5.0, "5.0 (float)"),
        (np.float32(5), "5.0 (float)"),
        (Token.BOS, "<Token.BOS: 1> (Token)"),
        (None, "None (NoneType)"),
        ("5", "'5' (str)"),
        (b"5", "b'5' (bytes)"),
        ([5], "[5] (list)"),
        (np.array([5]), "[5] (list)"),
    ],
)
def test_what_is_no_token_id_is_named_with_its_index(bad: Any, shown: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"query[2] is {shown}; expected an integer token id, 0 to 4294967295")
    ):
        KVCacheKey.from_tokens([1, 2, bad, 4], block_tokens=2)


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda v: array("q", v)])
@pytest.mark.parametrize("bad", [-1, 2**32])
def test_array_element_out_of_range_is_named_with_its_index(make: Any, bad: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"query[2] is {bad} (int)")):
        KVCacheKey.from_tokens(make([1, 2, bad, 4]), block_tokens=2)


def test_range_out_of_range_is_named_with_its_index() -> None:
    with pytest.raises(ValueError, match=re.escape("query[3] is -1 (int)")):
        KVCacheKey.from_tokens(range(2, -2, -1), block_tokens=2)


def test_error_names_the_prefix() -> None:
    with pytest.raises(ValueError, match=re.escape("prefix[0] is -1")):
        KVCacheKey.from_tokens([1], block_tokens=1, prefix=[-1])


@pytest.mark.parametrize(
    "batch", [np.zeros((1, 16), int), torch.zeros((1, 16), dtype=torch.long), torch.tensor(5), np.int64(5)]
)
def test_array_of_other_than_one_dimension_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"query has shape .*; expected one dimension: .*ids\[0\]"):
        KVCacheKey.from_tokens(batch, block_tokens=16)


@pytest.mark.parametrize(
    "floats",
    [
        np.ones(4),
        np.ones(4, bool),
        torch.ones(4),
        torch.ones(4, dtype=torch.bfloat16),
        np.array(["1"]),
        np.array([1, None]),
    ],
)
def test_array_of_another_dtype_is_refused(floats: Any) -> None:
    with pytest.raises(ValueError, match=r"query has dtype .*; expected an integer dtype"):
        KVCacheKey.from_tokens(floats, block_tokens=2)


@pytest.mark.parametrize("ids", ["12", b"12", bytearray(b"12"), memoryview(b"12"), {1, 2}, iter([1]), {1: 2}, 5, None])
def test_what_is_no_sequence_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(TypeError, match=r"query is of type .*; expected a sequence of token ids"):
        KVCacheKey.from_tokens(ids, block_tokens=2)


def test_plain_ids_need_neither_numpy_nor_torch() -> None:
    code = (
        "import sys; from kvstore.keys import KVCacheKey as K; import kvstore.keys.chains, kvstore.namespace\n"
        "K.from_tokens(range(40), block_tokens=16, prefix=[1] * 16); K.from_block_hashes([b'a'], block_tokens=16, chained=True)\n"
        "print([m for m in ('numpy', 'torch') if m in sys.modules])"
    )

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
