"""The examples of the two reference pages run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


@pytest.mark.parametrize("page", ["codecs.md", "record-format.md"])
def test_the_examples_on_the_page_are_true(page: str) -> None:
    result = doctest.testfile(str(REFERENCE / page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
