"""The list of decision records is complete, and each record has its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, parse

RECORDS = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_listed_under_its_title(path: Path) -> None:
    title = parse(path.read_text(encoding="utf-8")).headings[0]
    number = path.stem[:4]
    assert title.startswith(f"ADR {number}: ")
    listed = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    assert f"- [{number}]({path.name}): {title.partition(': ')[2]}." in listed


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_parts(path: Path) -> None:
    page = parse(path.read_text(encoding="utf-8"))
    assert [word.split()[0] for word in page.headings[1:5]] == ["Context", "Decision", "Consequences", "Alternatives"]
    assert "Status: " in page.prose


def test_there_are_records() -> None:
    assert len(RECORDS) >= 6
