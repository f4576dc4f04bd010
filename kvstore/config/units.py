"""Sizes and durations as people write them: ``"4GiB"``, ``"10GB"``, ``"500ms"``, ``"2min"``."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

_BYTES: Final = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTP", 1)},
    "KB": 1000,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}
_SECONDS: Final = {
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}

SIZE: Final = 'a size above 0: bytes as an integer, or text such as "4GiB" (2^30 bytes) or "10GB" (10^9 bytes)'
DURATION: Final = 'a duration: seconds as a number, or text such as "500ms", "5s" or "2min"'

# Any float fits 400 digits; a million of them would keep Decimal busy for half a minute.
_QUANTITY: Final = re.compile(r"(?P<number>[0-9]{1,400}(?:\.[0-9]{1,400})?) ?(?P<unit>[A-Za-z]*)", re.ASCII)

_MAX_BYTES: Final = 1 << 63  # sizes end up in file offsets


def parse_bytes(value: object) -> int:
    """Read a size above 0.

    Args:
        value: A positive integer of bytes, or a number followed by ``B``, ``kB`` to ``PB``
            (powers of 1000) or ``KiB`` to ``PiB`` (powers of 1024).

    Raises:
        ValueError: The text or number is not one of these; the message says what is wrong with it.
        TypeError: It is neither text nor a number.
    """
    if isinstance(value, str):
        number, factor = _quantity(value, {unit: Decimal(factor) for unit, factor in _BYTES.items()}, "4GiB")
        exact = number * factor
        if exact != exact.to_integral_value():
            msg = "not a whole number of bytes"
            raise ValueError(msg)
        n_bytes = int(exact)
    elif isinstance(value, int) and not isinstance(value, bool):
        n_bytes = value
    else:
        msg = f"got {_type_name(value)}"
        raise TypeError(msg)
    if not 0 < n_bytes < _MAX_BYTES:
        msg = "not above 0" if n_bytes <= 0 else "beyond any medium"
        raise ValueError(msg)
    return n_bytes


def parse_seconds(value: object) -> float:
    """Read a duration, 0 included.

    Args:
        value: A finite non-negative number of seconds, or a number followed by ``us``, ``ms``,
            ``s``, ``min`` or ``h``.

    Raises:
        ValueError: The text or number is not one of these; the message says what is wrong with it.
        TypeError: It is neither text nor a number.
    """
    if isinstance(value, str):
        number, factor = _quantity(value, _SECONDS, "5s")
        seconds = float(number * factor)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = as_float(value)
    else:
        msg = f"got {_type_name(value)}"
        raise TypeError(msg)
    if not math.isfinite(seconds) or seconds < 0:
        msg = "negative" if seconds < 0 else "not finite"
        raise ValueError(msg)
    return seconds


def as_float(number: float) -> float:
    """Convert a number; an integer that is too large for a float becomes infinity."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def format_bytes(n_bytes: int) -> str:
    """Write a size exactly, in the largest unit that keeps it whole; :func:`parse_bytes` reads it."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if n_bytes and n_bytes % _BYTES[unit] == 0:
            return f"{n_bytes // _BYTES[unit]}{unit}"
    return f"{n_bytes}B"


def format_seconds(seconds: float) -> str:
    """Write a duration so that :func:`parse_seconds` reads the same number."""
    if 0 < seconds < 1 and (seconds * 1000).is_integer():
        return f"{int(seconds * 1000)}ms"
    return f"{Decimal(repr(seconds)).normalize():f}s"


def _quantity(text: str, units: dict[str, Decimal], example: str) -> tuple[Decimal, Decimal]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        msg = "not a number followed by a unit"
        raise ValueError(msg)
    unit = match["unit"]
    if not unit:
        msg = f'no unit; write it as in "{example}"'
        raise ValueError(msg)
    if unit not in units:
        near = [known for known in units if known.lower() == unit.lower()]
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        msg = f"unknown unit {unit!r}{meant}; units: {', '.join(units)}"
        raise ValueError(msg)
    return Decimal(match["number"]), units[unit]


def _type_name(value: object) -> str:
    names: dict[type[object], str] = {bool: "true or false", float: "a fraction"}
    return names.get(type(value), f"a {type(value).__name__}")
