"""The examples of the reference page run."""

from __future__ import annotations

import doctest
from pathlib import Path

import kvstore.keys.extra
import kvstore.keys.key
import kvstore.namespace

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "keys.md"


def test_examples_of_the_reference_page_run() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)

    assert result.failed == 0
    assert result.attempted >= 20


def test_examples_of_the_docstrings_run() -> None:
    for module in (kvstore.keys.key, kvstore.keys.extra, kvstore.namespace):
        result = doctest.testmod(module)

        assert result.failed == 0
        assert result.attempted >= 1
