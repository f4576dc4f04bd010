"""Every number of ``stats()`` and ``health()`` is explained in docs/reference/stats.md."""

from __future__ import annotations

import dataclasses
import doctest
import re
from typing import Any, get_args

import pytest

from kvstore.l1.counters import L1Counters
from kvstore.l2.counters import TierCounters
from kvstore.stats import CacheCounters, GroupCounters, Health, HealthState, Stats, TierHealth, TierStats
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs/reference/stats.md"
SECTIONS: list[type[Any]] = [
    Stats,
    CacheCounters,
    L1Counters,
    TierStats,
    TierCounters,
    GroupCounters,
    Health,
    TierHealth,
]


def section(name: str) -> str:
    """Text below one ``##`` heading."""
    return PAGE.read_text(encoding="utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def documented(name: str) -> list[str]:
    """First column of the tables in a section that explain fields."""
    tables = section(name).split("| field | meaning |\n")[1:]
    return [row for table in tables for row in re.findall(r"^\| `(\w+)` \|", table.partition("\n\n")[0], re.MULTILINE)]


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_a_section_explains_exactly_the_fields_there_are(kind: type[Any]) -> None:
    assert sorted(documented(kind.__name__)) == sorted(field.name for field in dataclasses.fields(kind))


def test_every_health_state_is_explained() -> None:
    text = section("TierHealth")
    assert [state for state in get_args(HealthState) if f"| `{state}` |" not in text] == []


def test_the_example_shows_what_happens() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
