"""Every scenario runs over every medium that it is about; nothing is left out by a slip in a decorator."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.faults.media import MEDIA
from tests.faults.store import LETTERS, over

REQUIRED = {
    "a01": "LNTS", "a02": "LNTS", "a03": "LNTS", "a04": "LNTS", "a05": "L", "a06": "LNT", "a07": "L",
    "a08": "LNTS", "a09": "LNTS", "a10": "LNTS", "a14": "LNTS", "a15": "LNTS", "a16": "LNTS", "a17": "LNTS",
    "a18": "LNTS", "a19": "LNTS", "a20": "LNTS", "a21": "LNTS", "a22": "LNTS", "a23": "LNTS", "a24": "L", "a25": "LNTS",
    "a26": "L", "a11": "S", "a12": "S", "a13": "S",
}  # fmt: skip
"""Media of each scenario; T, the tree of files, shares the engine of S and the disk of N."""


def modules() -> dict[str, str]:
    """Scenario to module name."""
    found = {}
    for path in Path(__file__).parent.glob("test_a[0-9]*.py"):
        match = re.match(r"test_(a\d\d)_", path.name)
        assert match is not None, path
        found[match[1]] = f"tests.faults.{path.stem}"
    return found


@pytest.mark.parametrize("scenario", REQUIRED)
def test_a_scenario_runs_over_its_media(scenario: str) -> None:
    module = importlib.import_module(modules()[scenario])
    tests = [getattr(module, name) for name in dir(module) if name.startswith("test_")]
    covered = {letter for test in tests for letter in getattr(test, "media", "")}
    assert covered >= set(REQUIRED[scenario])
    for test in tests:
        marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize" and m.args[0] == "store"]
        assert len(marks) == (1 if hasattr(test, "media") else 0)
        for mark in marks:
            assert mark.args[1] == [LETTERS[letter] for letter in test.media]


def test_every_letter_is_a_medium() -> None:
    assert set(LETTERS.values()) == set(MEDIA)
    with pytest.raises(KeyError):
        over("X")
