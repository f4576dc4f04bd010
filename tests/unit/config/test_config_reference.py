from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvstore.config.schema import text
from kvstore.config.sections import defaults_fields, gate_fields, l1_fields, tier_fields
from kvstore.plugins import Registry
from kvstore.plugins.options import OptionField, option_fields

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "config.md"

TYPES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "bytes": "size",
    "seconds": "duration",
    "strings": "texts",
}


def row(option: OptionField) -> str:
    """The line of the reference that documents ``option``."""
    takes = ", ".join(f"`{choice}`" for choice in option.choices) or TYPES[option.form]
    default = (
        "required" if option.required else "" if option.default in (None, "") else f"`{text(option, option.default)}`"
    )
    return f"| `{option.name}` | {takes} | {default} | {option.doc} |"


SECTIONS: Final[dict[str, Callable[[], tuple[OptionField, ...]]]] = {
    "l1": l1_fields,
    "defaults": defaults_fields,
    "gate": gate_fields,
    "l2": tier_fields,
    "lmdb": lambda: option_fields(Registry.discover().backend("lmdb").options),
}


@pytest.mark.parametrize("section", SECTIONS)
def test_reference_has_the_row_of_every_key(section: str) -> None:
    lines = REFERENCE.read_text(encoding="utf-8").splitlines()
    options = SECTIONS[section]()
    assert options
    assert [row(option) for option in options if row(option) not in lines] == []
