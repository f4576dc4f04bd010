"""Links between pages lead somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, pages, parse


def broken_links(path: Path) -> list[str]:
    page = parse(path.read_text(encoding="utf-8"))
    broken = []
    for target in page.links:
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, fragment = target.partition("#")
        linked = (path.parent / name) if name else path
        if not linked.exists():
            broken.append(f"{target}: no such file")
        elif fragment and linked.suffix == ".md" and fragment not in parse(linked.read_text(encoding="utf-8")).anchors:
            broken.append(f"{target}: no such heading")
    return broken


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# There\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[1](b.md) [2](b.md#there) [3](b.md#nowhere) [4](c.md) [5](https://example.org/x) [6](#here)\n\n# Here\n"
    )
    assert broken_links(page) == ["b.md#nowhere: no such heading", "c.md: no such file"]
