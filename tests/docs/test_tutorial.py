"""The tutorial, typed in: its files are saved, its commands run, its output compared."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, CodeBlock, parse

TUTORIAL = ROOT / "docs/tutorial/first-cache.md"

_SAVE_AS = re.compile(r"\b[Ss]ave (?:this|them) as `(?P<name>[\w.-]+)`:$")


def saved_name(lines: list[str], block: CodeBlock) -> str:
    """Name that the text right above a block tells the reader to save it under, or ``""``."""
    above = [line for line in lines[: block.line - 2] if line.strip() and not line.startswith("<!--")]
    found = _SAVE_AS.search(above[-1]) if above else None
    return found["name"] if found else ""


def run(command: str, folder: Path) -> str:
    """What a command prints, as a reader in an activated environment would see it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HOME": str(folder), "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands(block: CodeBlock) -> list[tuple[str, str]]:
    """Each command of a console block with the output shown below it."""
    parts = re.split(r"^\$ (.*)\n?", block.code, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def difference(shown: str, printed: str) -> str:
    """Empty when the output is what the page shows; ``...`` stands for anything."""
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
    shown, printed = shown.rstrip() + "\n", printed.rstrip() + "\n"
    return "" if checker.check_output(shown, printed, flags) else f"shown:\n{shown}\nprinted:\n{printed}"


def follow(page: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Do what a page says; returns the files saved and the commands run."""
    text = page.read_text(encoding="utf-8")
    files: list[str] = []
    ran: list[str] = []
    for block in parse(text).blocks:
        name = saved_name(text.splitlines(), block)
        if name:
            (folder / name).write_text(block.code + "\n", encoding="utf-8")
            files.append(name)
        for command, shown in commands(block) if block.language == "console" else []:
            assert difference(shown, run(command, folder)) == "", f"{page.name}:{block.line}"
            ran.append(command)
    return files, ran


def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    files, ran = follow(TUTORIAL, tmp_path)

    scripts = [name for name in files if name.endswith(".py")]
    assert files[0] == "kvstore.toml"
    assert len(scripts) == sum(block.language == "python" for block in parse(TUTORIAL.read_text()).blocks)
    assert {f"python {name}" for name in scripts if name != "mycache.py"} <= set(ran)


def test_other_output_than_shown_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Save this as `a.py`:\n\n```python\nprint(1 + 1)\n```\n\n```console\n$ python a.py\n3\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:8"):
        follow(page, tmp_path)
