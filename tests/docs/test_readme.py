"""What the README shows is what happens."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvstore.config import load_config
from tests.docs.markdown import ROOT, page, parse

README = ROOT / "README.md"
MAX_LINES = 150


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_the_library_example_is_short_and_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = page("README.md").blocks
    at = next(i for i, block in enumerate(blocks) if block.language == "python")
    example, shown = blocks[at], blocks[at + 1]
    assert shown.language == "text"
    assert len([line for line in example.code.splitlines() if line.strip()]) <= 20

    exec(compile(example.code, str(README), "exec"), {"__name__": "__main__"})  # noqa: S102 - that is the test

    assert capsys.readouterr().out.strip() == shown.code.strip()


def test_every_config_shown_is_valid() -> None:
    shown = [block.code for block in page("README.md").blocks if block.language == "toml"]
    assert shown
    for text in shown:
        load_config(tomllib.loads(text))


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_exist(target: str) -> None:
    assert f"make {target} " in README.read_text(encoding="utf-8")
    assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_demo_output_is_that_of_a_green_run() -> None:
    text = README.read_text(encoding="utf-8")
    shown = text.partition("<!-- demo output: begin -->")[2].partition("<!-- demo output: end -->")[0]
    output = parse(shown).blocks[0].code
    assert "bit-identical:" in output
    assert " NO " not in output
