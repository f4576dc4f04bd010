from __future__ import annotations

import re
from pathlib import Path

DIRFILES = Path(__file__).parent / "dirfiles"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-backend.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_page_shows_the_distribution_that_the_tests_install() -> None:
    assert blocks("toml")[0] == (DIRFILES / "pyproject.toml").read_text()
    hooks, get_many, conformance = blocks("python")[:3]
    assert hooks == (DIRFILES / "kvstore_dirfiles" / "hooks.py").read_text()
    assert get_many in (DIRFILES / "kvstore_dirfiles" / "backend.py").read_text()
    assert conformance == (DIRFILES / "tests" / "test_conformance.py").read_text()


def test_the_backend_is_short() -> None:
    lines = (DIRFILES / "kvstore_dirfiles" / "backend.py").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.strip().startswith('"""')]) < 100
