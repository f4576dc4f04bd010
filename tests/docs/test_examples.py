"""Python blocks of the pages that people type from run, top to bottom, one namespace a page.

A block that cannot run in a test has ``<!-- no-run: reason -->`` above it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, CodeBlock, parse

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/tutorial").rglob("*.md")),
    *sorted((ROOT / "docs/how-to").rglob("*.md")),
]


def run_blocks(path: Path, blocks: list[CodeBlock]) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        padded = "\n" * (block.line - 1) + block.code  # so that a traceback names the page's own line
        exec(compile(padded, str(path), "exec"), namespace)  # noqa: S102 - that is the test


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    python = [block for block in parse(path.read_text(encoding="utf-8")).blocks if block.language in ("python", "py")]
    runnable = [block for block in python if not block.no_run]
    if not runnable:
        pytest.skip("no Python to run on this page")
    run_blocks(path, runnable)


def test_a_failing_block_names_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# T\n\n```python\nx = 1\n```\n\n```python\ny = x\nraise KeyError(y)\n```\n")
    with pytest.raises(KeyError, match="1") as caught:
        run_blocks(page, list(parse(page.read_text()).blocks))
    assert caught.traceback[-1].path == page
    assert caught.traceback[-1].lineno == 8 - 0  # zero-based: line 9 of the page
