"""How the command line shows sizes, ages, tables, JSON and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR


def size(nbytes: float) -> str:
    """Show a number of bytes with a binary unit, three digits or so."""
    value = float(nbytes)
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def age(seconds: float) -> str:
    """Show a time span by its largest unit."""
    for span, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= span:
            return f"{seconds / span:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def ratio(raw_bytes: int, stored_bytes: int) -> str:
    """Show how much smaller the stored form is."""
    return f"{raw_bytes / stored_bytes:.3f}" if stored_bytes else "-"


def plural(count: int, noun: str) -> str:
    """Show a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_json(value: Any) -> None:
    """Print one JSON document on one line."""
    print(json.dumps(value, ensure_ascii=False, default=str))


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Align rows into columns.

    Args:
        rows: Cells; the first row is the heading.
        right: Columns aligned to the right, for numbers.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


@contextmanager
def progress(what: str, total: int, *, shown: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Show the progress of long work on standard error, and only on a terminal.

    A bar when the package ``rich`` is installed, a counter in place otherwise.

    Args:
        what: One or two words.
        total: Steps to come; 0 when unknown.
        shown: Overrides the question whether standard error is a terminal.

    Yields:
        ``advance(steps)``.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda steps: None  # noqa: ARG005 - nothing to show
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield from _plain_progress(what, total)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total or None)
        yield lambda steps: bar.advance(task, steps)


def _plain_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    done = 0

    def advance(steps: int) -> None:
        nonlocal done
        done += steps
        sys.stderr.write(f"\r{what}: {done:,}" + (f" of {total:,}" if total else ""))
        sys.stderr.flush()

    try:
        yield advance
    finally:
        sys.stderr.write("\n" if done else "")
