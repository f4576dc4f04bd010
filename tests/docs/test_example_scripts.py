"""Every script in examples/ runs and prints what its docstring shows under ``Prints::``."""

from __future__ import annotations

import ast
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

NEEDS_A_MODEL = {"transformers_generate.py"}
SCRIPTS = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in NEEDS_A_MODEL)


def shown_output(path: Path) -> str:
    """What the docstring of a script promises."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return textwrap.dedent(docstring.partition("Prints::\n")[2]).strip()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_an_example_prints_what_its_docstring_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(path)])
    promised = shown_output(path)
    assert promised

    runpy.run_path(str(path), run_name="__main__")

    assert capfd.readouterr().out.strip() == promised
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


def test_there_are_examples() -> None:
    assert {
        "quickstart.py",
        "block_hashes.py",
        "zero_copy.py",
        "two_processes.py",
        "custom_backend.py",
        "tiers.py",
    } <= {path.name for path in SCRIPTS}
