"""The table of kinds of failure is complete, and each row points to tests that exist.

A row is ``| K1 | who: what happened | what kvstore does | [law](path#test_law)<br>... |``: the link's end is the name of
the test, with its class before it if it has one, and its text is that name in words.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "explanation" / "failure-modes.md"
THEMES = {
    "K": 31, "D": 24, "C": 23, "X": 15, "N": 16, "T": 25, "R": 7, "P": 13, "F": 9, "S": 15, "O": 6, "E": 12,
}  # fmt: skip
"""Kinds of each theme, 196 in all."""

REQUIREMENTS = 18
LONGEST_CELL = 110  # characters: a row stays readable beside its tests
MOST_TESTS = 3

_ROW = re.compile(r"^\| (?P<id>[A-Z]?\d+) \| (?P<cells>.*) \|$")
_TEST = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>[^)#]+)#(?P<name>[\w:]+)\)")


@dataclass(frozen=True)
class Row:
    """One row: its id, the cells between, and the cell of tests."""

    id: str
    cells: tuple[str, ...]
    tests: str

    @property
    def links(self) -> list[tuple[str, str, str]]:
        """Text, path and name of each test."""
        return [(found["text"], found["path"], found["name"]) for found in _TEST.finditer(self.tests)]


def sections(text: str) -> dict[str, list[Row]]:
    """Rows below each heading, by the theme's letter; the requirements are under ``""``."""
    found: dict[str, list[Row]] = {}
    rows: list[Row] = []
    for line in text.splitlines():
        if line.startswith("## "):
            letter, colon, _ = line.removeprefix("## ").partition(":")
            rows = found.setdefault(letter if colon else "", [])
        elif (match := _ROW.match(line)) is not None:
            *cells, tests = match["cells"].split(" | ")
            rows.append(Row(match["id"], tuple(cells), tests))
    return found


@functools.cache
def laws_in(path: Path) -> frozenset[str]:
    """Names of the test functions of a file, ``Class::function`` for those of a class; nothing is imported."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {
            prefix + one.name for one in inside if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")
        }
    return frozenset(names)


def what_is_wrong(row: Row) -> list[str]:
    """Everything that a row lacks, in words."""
    wrong = []
    for text, target, name in row.links:
        path = (PAGE.parent / target).resolve()
        if not path.is_file() or path.suffix != ".py":
            wrong.append(f"{row.id}: no file {target}")
        elif name not in laws_in(path):
            wrong.append(f"{row.id}: no test {name} in {target}")
        if text != name.rpartition("::")[2].removeprefix("test_").replace("_", " "):
            wrong.append(f"{row.id}: {text!r} is not what {name} says")
    if len(row.links) > MOST_TESTS or len(row.links) != len(row.tests.split("<br>")) * bool(row.tests.strip()):
        wrong.append(f"{row.id}: {row.tests!r} is no list of at most {MOST_TESTS} tests")
    impossible = [cell for cell in row.cells if re.search(r"\*\*cannot occur\*\*: \w+", cell)]
    if not row.links and not impossible:
        wrong.append(f"{row.id}: neither a test nor why it cannot occur")
    wrong += [f"{row.id}: a cell of {len(c)} characters" for c in row.cells[:2] if len(c) > LONGEST_CELL]
    return wrong


@pytest.fixture(scope="module")
def themes() -> dict[str, list[Row]]:
    return sections(PAGE.read_text(encoding="utf-8"))


def test_no_theme_is_left_out(themes: dict[str, list[Row]]) -> None:
    assert [letter for letter in themes if letter] == list(THEMES)
    assert sum(THEMES.values()) == 196


@pytest.mark.parametrize("theme", THEMES)
def test_every_kind_has_one_row(themes: dict[str, list[Row]], theme: str) -> None:
    ids = [row.id for row in themes[theme]]
    assert ids == [f"{theme}{n}" for n in range(1, THEMES[theme] + 1)]


@pytest.mark.parametrize("theme", THEMES)
def test_every_row_points_to_tests_that_exist(themes: dict[str, list[Row]], theme: str) -> None:
    assert [wrong for row in themes[theme] for wrong in what_is_wrong(row)] == []


@pytest.mark.parametrize("theme", THEMES)
def test_every_row_names_a_report(themes: dict[str, list[Row]], theme: str) -> None:
    unnamed = [row.id for row in themes[theme] if not re.search(r" #\d+|CVE-\d|\.\w{2,3}\b|measured", row.cells[0])]
    assert unnamed == []


def test_every_requirement_has_its_place_and_tests(themes: dict[str, list[Row]]) -> None:
    rows = themes[""]
    assert [row.id for row in rows] == [str(n) for n in range(1, REQUIREMENTS + 1)]
    for row in rows:
        assert what_is_wrong(Row(row.id, row.cells[:1], row.tests)) == []
        places = re.findall(r"\]\(([^)]+)\)", row.cells[1])
        assert places, row
        assert [place for place in places if not (PAGE.parent / place).resolve().is_file()] == []


def test_what_a_row_may_not_be_is_noticed() -> None:
    good = "[no theme is left out](../../tests/docs/test_failure_modes.py#test_no_theme_is_left_out)"
    assert what_is_wrong(Row("K1", ("a #1", "b"), good)) == []
    assert what_is_wrong(Row("K1", ("a #1", "**cannot occur**: it has no such thing"), "")) == []
    for tests in (
        "",
        "somewhere",
        good.replace("left_out)", "left_in)"),
        good.replace("test_failure_modes", "test_failures"),
        good.replace("[no theme", "[some theme"),
        "<br>".join([good] * (MOST_TESTS + 1)),
    ):
        assert what_is_wrong(Row("K1", ("a #1", "b"), tests)), tests
    assert what_is_wrong(Row("K1", ("a #1", "**cannot occur**"), ""))
    assert what_is_wrong(Row("K1", ("x" * 200, "b"), good))
    assert sections("## K: Keys\n| K1 | a | b | c |\n") == {"K": [Row("K1", ("a", "b"), "c")]}
