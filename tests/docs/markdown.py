"""Just enough Markdown: headings, links and fenced code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<info>[^`]*)$")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *#*$")
_LINK = re.compile(r"!?\[[^\]\n]*\]\((?P<target>[^()\s]+)(?: +\"[^\"]*\")?\)")
_NO_RUN = re.compile(r"^<!-- no-run: (?P<reason>.*\S) *-->$")


@dataclass(frozen=True)
class CodeBlock:
    """One fenced block; ``line`` is that of its first line of code, ``no_run`` why not to run it."""

    language: str
    code: str
    line: int
    no_run: str = ""


@dataclass(frozen=True)
class Page:
    """A parsed page."""

    prose: str
    headings: tuple[str, ...]
    blocks: tuple[CodeBlock, ...]

    @property
    def links(self) -> list[str]:
        """Targets of inline links, without those in code."""
        return [found["target"] for found in _LINK.finditer(re.sub(r"`[^`\n]*`", "", self.prose))]

    @property
    def anchors(self) -> set[str]:
        """What ``#fragment`` links may name."""
        return {anchor(heading) for heading in self.headings}


def anchor(heading: str) -> str:
    """The fragment that a heading gets: lower case, punctuation dropped, spaces to hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def parse(text: str) -> Page:
    """Parse one page."""
    prose: list[str] = []
    headings: list[str] = []
    blocks: list[CodeBlock] = []
    lines = text.splitlines()
    i = 0
    no_run = ""
    while i < len(lines):
        opening = _FENCE.match(lines[i])
        if opening:
            start = i + 1
            i = start
            while i < len(lines) and not lines[i].strip().startswith(opening["fence"]):
                i += 1
            code = "\n".join(line.removeprefix(opening["indent"]) for line in lines[start:i])
            language = (opening["info"].split() or [""])[0]
            blocks.append(CodeBlock(language, code, start + 1, no_run))
        else:
            prose.append(lines[i])
            heading = _HEADING.match(lines[i])
            if heading:
                headings.append(heading["text"])
        reason = _NO_RUN.match(lines[i]) if i < len(lines) else None
        no_run = reason["reason"] if reason else (no_run if i < len(lines) and not lines[i].strip() else "")
        i += 1
    return Page("\n".join(prose), tuple(headings), tuple(blocks))


def pages() -> list[Path]:
    """Every Markdown page of the project."""
    folders = ("docs", "kvstore", "backends", "plugins", "tests", "benchmarks", "examples")
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    return sorted(found)


def page(relative: str) -> Page:
    """Parse the page at a path relative to the project."""
    return parse((ROOT / relative).read_text(encoding="utf-8"))
