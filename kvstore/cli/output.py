"""How the command line shows sizes, ages, tables, JSON and progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
_SHOWN_CHARS: Final = 160  # the name of a member of an archive takes 100
_REDRAW_S: Final = 0.1  # more often than that nobody reads a line
_ESTIMATE_AFTER_S: Final = 2.0  # before that, opening and first reads count too much


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


def printable(text: str) -> str:
    """Show text that somebody else wrote: no control characters that a terminal would obey, and not too long."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[: _SHOWN_CHARS - 3]}..."


def print_json(value: Any, *, to_errors: bool = False) -> None:
    """Print one JSON document on one line; to standard error where the output is something else."""
    print(json.dumps(value, ensure_ascii=False, default=str), file=sys.stderr if to_errors else sys.stdout)


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


class Advance(Protocol):
    """Tells the progress of long work."""

    def __call__(self, steps: int, nbytes: int = 0) -> None:
        """So many more steps are done, in which so many bytes were moved."""
        ...


@contextmanager
def progress(what: str, total: int, *, shown: bool | None = None) -> Iterator[Advance]:
    """Show the progress of long work on standard error, and only on a terminal.

    Steps done, bytes and their rate where bytes are told, and the time that is left where the total
    is known: as a bar when the package ``rich`` is installed, as a line in place otherwise.

    Args:
        what: One or two words.
        total: Steps to come; 0 when unknown.
        shown: Overrides the question whether standard error is a terminal.

    Yields:
        ``advance(steps, nbytes=0)``.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda steps, nbytes=0: None  # noqa: ARG005 - nothing to show
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield from _plain_progress(what, total)
        return
    moved = TextColumn("{task.fields[moved]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), moved, TimeRemainingColumn())
    pace = _Pace(total)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total or None, moved="")

        def advance(steps: int, nbytes: int = 0) -> None:
            pace.add(steps, nbytes)
            bar.update(task, advance=steps, moved=pace.moved())

        yield advance


class _Pace:
    """How far work is, and how fast."""

    def __init__(self, total: int) -> None:
        self._began = time.monotonic()
        self._total = total
        self._nbytes = 0
        self.done = 0

    def add(self, steps: int, nbytes: int) -> None:
        """Count what was done."""
        self.done += steps
        self._nbytes += nbytes

    def moved(self) -> str:
        """Bytes and their rate; empty as long as there are none."""
        if not self._nbytes:
            return ""
        seconds = max(time.monotonic() - self._began, 1e-3)
        return f"{size(self._nbytes)}, {self._nbytes / 1e6 / seconds:,.0f} MB/s"

    def line(self) -> str:
        """Everything in one line."""
        parts = [f"{self.done:,}" + (f" of {self._total:,}" if self._total else ""), self.moved()]
        taken_s = time.monotonic() - self._began
        if 0 < self.done < self._total and taken_s >= _ESTIMATE_AFTER_S:
            left_s = taken_s * (self._total - self.done) / self.done
            parts.append(f"{age(left_s)} left")
        return ", ".join(part for part in parts if part)


def _plain_progress(what: str, total: int) -> Iterator[Advance]:
    pace = _Pace(total)
    shown_at, width = 0.0, 0

    def show() -> None:
        nonlocal width
        line = f"{what}: {pace.line()}"
        sys.stderr.write(f"\r{line.ljust(width)}")
        sys.stderr.flush()
        width = len(line)

    def advance(steps: int, nbytes: int = 0) -> None:
        nonlocal shown_at
        pace.add(steps, nbytes)
        if time.monotonic() - shown_at >= _REDRAW_S:
            shown_at = time.monotonic()
            show()

    try:
        yield advance
    finally:
        if pace.done:
            show()
            sys.stderr.write("\n")
