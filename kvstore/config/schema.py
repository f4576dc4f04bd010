"""Reads one config section strictly against the fields of its dataclass."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from kvstore.config.place import Place
from kvstore.config.toml_text import toml_value
from kvstore.config.units import DURATION, SIZE, as_float, format_bytes, format_seconds, parse_bytes, parse_seconds
from kvstore.plugins.naming import did_you_mean, nearest
from kvstore.plugins.options import Form, OptionField

PLAIN_FORMS: Final[dict[Form, str]] = {
    "str": "text",
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "bytes": SIZE,
    "seconds": DURATION,
    "strings": "an array of texts",
}


def read_section(
    options: Sequence[OptionField],
    values: Mapping[str, object],
    place: Place,
    *,
    siblings: Iterable[str] = (),
    hint: Callable[[str], str] = lambda _: "",
) -> dict[str, Any]:
    """Read a section; every key must be known, every value right, every required key there.

    Args:
        options: Its schema.
        values: As parsed from TOML, or given by a caller.
        place: Where the section stands.
        siblings: Keys that the section also has, read elsewhere; for near matches.
        hint: What to say about an unknown key, ``""`` for the nearest known one.

    Returns:
        The given keys only, in the types of the dataclass.

    Raises:
        ConfigError: A value is wrong or a required key is missing.
        UnknownKeyError: A key is not in the schema.
    """
    by_name = {option.name: option for option in options}
    read: dict[str, Any] = {}
    for name, value in values.items():
        option = by_name.get(name)
        if option is None:
            secret = _may_be_secret(name, options, siblings)
            raise place.key(name).unknown(value, {*by_name, *siblings}, hint=hint(name), secret=secret)
        read[name] = read_value(option, value, place.key(name))
    for option in options:
        if option.required and option.name not in read:
            raise place.key(option.name).missing(f"{expectation(option)}; {option.doc or 'it has no default'}")
    return read


def _may_be_secret(name: str, options: Sequence[OptionField], siblings: Iterable[str]) -> bool:
    """Whether the value of an unknown key might belong to a secret option of the section."""
    secrets = {option.name for option in options if option.secret}
    harmless = {option.name for option in options if not option.secret}.union(siblings)
    return bool(secrets) and nearest(name, secrets | harmless) not in harmless


def read_value(option: OptionField, value: object, place: Place) -> Any:
    """Read one value.

    Raises:
        ConfigError: It is not what ``option`` takes.
    """
    if value is None and option.optional:
        return None
    if isinstance(value, os.PathLike) and option.form == "str":
        value = os.fspath(value)
    problem = ""
    try:
        read = _READERS[option.form](value, option)
    except (TypeError, ValueError) as e:
        problem = str(e)
    else:
        return read
    # Outside the except block: a chained ValueError could show a secret in a traceback.
    raise place.wrong(value, expectation(option), "" if option.secret else problem, secret=option.secret)


def expectation(option: OptionField) -> str:
    """Say in a few words what ``option`` takes."""
    if option.form == "choice":
        return f"one of {', '.join(repr(choice) for choice in option.choices)}"
    return PLAIN_FORMS[option.form]


def as_object(value: object, place: Place, expected: str) -> Mapping[str, object]:
    """Return ``value`` as a mapping with text keys.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(value, Mapping):
        raise place.wrong(value, expected)
    for key in value:
        if not isinstance(key, str):
            raise place.wrong(key, "text as a key")
    return value


def plain(option: OptionField, value: Any) -> Any:
    """Return ``value`` as TOML would hold it: enums as text, tuples as lists; what is wrong stays as it is."""
    if option.form == "choice" and value is not None:
        return next((choice for choice in option.choices if option.convert(choice) == value), value)
    return list(value) if isinstance(value, tuple) else value


def text(option: OptionField, value: Any) -> str:
    """Return ``value`` as a person would write it in TOML, with units; ``-`` for None."""
    if value is None:
        return "-"
    match option.form:
        case "bytes":
            return f'"{format_bytes(value)}"'
        case "seconds":
            return f'"{format_seconds(value)}"'
        case _:
            return toml_value(plain(option, value))


def _read_str(value: object, _: OptionField) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _read_int(value: object, _: OptionField) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _read_float(value: object, _: OptionField) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(as_float(value)):
        raise ValueError
    return float(value)


def _read_bool(value: object, _: OptionField) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _read_strings(value: object, _: OptionField) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return tuple(value)


def _read_choice(value: object, option: OptionField) -> Any:
    for choice in option.choices:
        if value == choice or value is option.convert(choice):
            return option.convert(choice)
    raise ValueError(did_you_mean(value, option.choices).removeprefix("; ") if isinstance(value, str) else "")


_READERS: Final[dict[Form, Callable[[object, OptionField], Any]]] = {
    "str": _read_str,
    "int": _read_int,
    "float": _read_float,
    "bool": _read_bool,
    "bytes": lambda value, _: parse_bytes(value),
    "seconds": lambda value, _: parse_seconds(value),
    "choice": _read_choice,
    "strings": _read_strings,
}
