"""Framing: no two values, and no two lists of values, share bytes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys.digest import KeyScope, check_int, encode_value

scalars = st.none() | st.binary(max_size=20) | st.text(max_size=10) | st.integers()


class Pool(enum.IntEnum):
    MAMBA = 1


class Name(enum.StrEnum):
    A = "a"


@given(scalars, scalars)
def test_values_share_bytes_only_when_equal_in_type_and_content(a: Any, b: Any) -> None:
    assert (encode_value(a) == encode_value(b)) == (type(a) is type(b) and a == b)


@given(st.lists(scalars, max_size=4), st.lists(scalars, max_size=4))
def test_concatenated_values_share_bytes_only_when_the_lists_are_equal(a: list[Any], b: list[Any]) -> None:
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]

    assert (b"".join(map(encode_value, a)) == b"".join(map(encode_value, b))) == same


@given(st.lists(scalars, max_size=4))
def test_values_can_be_read_back(values: list[Any]) -> None:
    data = b"".join(map(encode_value, values))

    assert _decode(data) == values


_READ: tuple[Callable[[bytes], Any], ...] = (
    lambda _: None,
    bytes,
    bytes.decode,
    lambda payload: int.from_bytes(payload, "little", signed=True),
)


def _decode(data: bytes) -> list[Any]:
    values: list[Any] = []
    while data:
        kind, length = data[0], int.from_bytes(data[1:9], "little")
        payload, data = data[9 : 9 + length], data[9 + length :]
        values.append(_READ[kind](payload))
    return values


def test_bytes_like_types_of_equal_content_are_one_value() -> None:
    assert encode_value(b"ab") == encode_value(bytearray(b"ab")) == encode_value(memoryview(b"xabx")[1:3])


def test_lone_surrogates_are_values_of_their_own() -> None:
    values = ["\udcff", "\ud83d\udd11", "\U0001f511", "?"]

    assert len({encode_value(v) for v in values}) == len(values)


@pytest.mark.parametrize("value", [True, Pool.MAMBA, Name.A, 1.5, (), object()])
def test_other_types_have_no_encoding(value: Any) -> None:
    with pytest.raises(TypeError, match="expected bytes, str or int"):
        encode_value(value)


def test_bytes_like_salts_of_equal_content_are_one_salt() -> None:
    salts: list[Any] = [b"ab", bytearray(b"ab"), memoryview(b"ab")]

    assert {KeyScope(1, 16, salt=salt) for salt in salts} == {KeyScope(1, 16, salt=b"ab")}


def test_scope_text_of_a_subclass_is_its_text() -> None:
    class Text(str):
        __slots__ = ()

    assert KeyScope(1, 16, salt=Text("a")).seed == KeyScope(1, 16, salt="a").seed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_tokens": 0}, ValueError, "block_tokens is 0; expected 1 to 2147483647"),
        ({"block_tokens": True}, TypeError, "block_tokens is True"),
        ({"block_tokens": Pool.MAMBA}, TypeError, "block_tokens is <Pool.MAMBA: 1>"),
        ({"group": False}, TypeError, "group is False"),
        ({"group": -1}, ValueError, "group is -1"),
        ({"group": 1 << 32}, ValueError, "group is 4294967296"),
        ({"salt": ""}, ValueError, "salt is empty"),
        ({"salt": b""}, ValueError, "salt is empty"),
        ({"salt": 5}, TypeError, "salt is of type int; expected bytes or str"),
        ({"salt": Name.A}, TypeError, "salt is of type Name"),
        ({"adapter": ""}, ValueError, "adapter is empty"),
        ({"adapter": b"a"}, TypeError, "adapter is of type bytes; expected str"),
    ],
)
def test_scope_refuses_what_it_cannot_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KeyScope(**{"kind": 1, "block_tokens": 16, **change})


def test_scope_does_not_show_its_salt() -> None:
    assert "hunter2" not in repr(KeyScope(1, 16, salt="hunter2"))


def test_check_int_accepts_its_bounds() -> None:
    check_int("n", 1, 1, 2)
    check_int("n", 2, 1, 2)
