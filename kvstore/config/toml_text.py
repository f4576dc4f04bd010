"""Writes the part of TOML that kvstore's config uses; the standard library only reads TOML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def toml_value(value: Any) -> str:
    """Write a text, number, boolean or array.

    Raises:
        TypeError: TOML has no such value.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings are JSON's, except that DEL must be escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    msg = f"TOML cannot hold {value!r}"
    raise TypeError(msg)


def toml_key(name: str) -> str:
    """Write a key, quoted when it has to be."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def toml_document(values: Mapping[str, Any]) -> str:
    """Write a document: plain keys first, then tables, a table of tables as those, and arrays of tables."""
    lines: list[str] = []
    tables: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value and all(isinstance(item, Mapping) for item in value.values()):
            for key, item in value.items():
                tables += ["", f"[{toml_key(name)}.{toml_key(key)}]", *_lines(item)]
        elif isinstance(value, Mapping):
            tables += ["", f"[{toml_key(name)}]", *_lines(value)]
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                tables += ["", f"[[{toml_key(name)}]]", *_lines(item)]
        else:
            lines.append(f"{toml_key(name)} = {toml_value(value)}")
    return "\n".join([*lines, *tables]).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{toml_key(name)} = {toml_value(value)}" for name, value in table.items()]
