from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config.units import format_bytes, format_seconds, parse_bytes, parse_seconds

SIZES = {
    "1B": 1,
    "4GiB": 4 << 30,
    "512 MiB": 512 << 20,
    "10GB": 10 * 10**9,
    "64KiB": 1 << 16,
    "2kB": 2000,
    "2KB": 2000,
    "1.5GiB": 3 << 29,
    "3TB": 3 * 10**12,
    "1PiB": 1 << 50,
    " 1 MiB ": 1 << 20,
}
BAD_SIZES = {
    "10 GiBs": "unknown unit 'GiBs'",
    "10gib": "did you mean GiB",
    "4Gb": "did you mean GB",
    "4G": "unknown unit 'G'; units: B, kB",
    "10": "no unit",
    "GiB": "not a number",
    "-1GiB": "not a number",
    "1e3MB": "not a number",
    "1 2MB": "not a number",
    "0.3B": "whole number",
    "٣MB": "not a number",
    "0GiB": "not above 0",
    "": "not a number",
    "99999999PiB": "beyond",
}


@pytest.mark.parametrize(("text", "n_bytes"), SIZES.items(), ids=SIZES)
def test_size_with_unit_is_exact(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(("text", "problem"), BAD_SIZES.items(), ids=BAD_SIZES)
def test_wrong_size_says_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_bytes(text)


@pytest.mark.parametrize("n_bytes", [0, -1, 1 << 63])
def test_size_out_of_range_is_refused(n_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"above 0|beyond"):
        parse_bytes(n_bytes)


@pytest.mark.parametrize("value", [True, math.nan, 1.0, None, [1]], ids=repr)
def test_size_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        parse_bytes(value)


@given(st.integers(1, (1 << 63) - 1))
def test_every_size_survives_formatting(n_bytes: int) -> None:
    assert parse_bytes(format_bytes(n_bytes)) == n_bytes
    assert parse_bytes(n_bytes) == n_bytes


DURATIONS = {"500ms": 0.5, "5s": 5.0, "2min": 120.0, "1h": 3600.0, "250us": 0.00025, "1.5 s": 1.5, "0s": 0.0}


@pytest.mark.parametrize(("text", "seconds"), DURATIONS.items(), ids=DURATIONS)
def test_duration_with_unit_is_exact(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("value", "problem"),
    [("5", "no unit"), ("5m", "unknown unit 'm'"), ("5 sec", "unknown"), ("-5s", "not a number"), (-1, "negative")],
)
def test_wrong_duration_says_what_is_wrong(value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_seconds(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_duration_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"not finite|negative"):
        parse_seconds(value)


@pytest.mark.parametrize("value", [True, None, [5]], ids=repr)
def test_duration_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        parse_seconds(value)


@given(st.floats(0, 1e9, allow_nan=False))
def test_every_duration_survives_formatting(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds
