"""The page of each backend: its options table is the schema, and it answers the questions every medium raises."""

from __future__ import annotations

import pytest

from kvstore.config.schema import text
from kvstore.plugins import Registry
from kvstore.plugins.options import OptionField, option_fields
from tests.docs.markdown import ROOT

BACKENDS = ("lmdb", "nvme", "s3")
HEAD = "| option | default | meaning |\n|---|---|---|\n"


def page_of(backend: str) -> str:
    return (ROOT / f"docs/reference/backends/{backend}.md").read_text(encoding="utf-8")


def row(option: OptionField) -> str:
    default = "none" if option.default is None else f"`{text(option, option.default)}`"
    return f"| `{option.name}` | {'required' if option.required else default} | {option.doc} |"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_table_of_options_is_the_schema(backend: str) -> None:
    table = page_of(backend).partition(HEAD)[2].partition("\n\n")[0]

    assert table == "\n".join(row(option) for option in option_fields(Registry.discover().backend(backend).options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_page_says_what_one_has_to_know(backend: str) -> None:
    headings = [line.lower() for line in page_of(backend).splitlines() if line.startswith("## ")]

    assert "durability" in page_of(backend)
    for topic in ("options", "space", "faults", "limits", "cost", "when not to use it"):
        assert any(topic in heading for heading in headings), topic


def test_every_own_backend_has_a_page() -> None:
    own = {
        p.name for p in Registry.discover().list() if p.distribution == "llm-kvstore" and p.target.endswith(".hooks")
    }

    assert set(BACKENDS) == own & {path.stem for path in (ROOT / "docs/reference/backends").glob("*.md")}
