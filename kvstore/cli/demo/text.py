"""The demo's report for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.cli.demo.facts import Answer, Outcome, Setup
from kvstore.cli.output import ratio, size, table

_BAR_WIDTH = 48


def report_lines(outcome: Outcome, files: Sequence[Path]) -> list[str]:
    """Everything the demo found out, as lines of plain text."""
    stored = outcome.computed.stored
    lines = ["", *_answers(outcome), "Time to first token, from prompt ids ready"]
    lines += [f"  {line}" for line in _bars(outcome)]
    lines += [f"  {outcome.ratio:.1f}x faster from the store ({opening_note(outcome)})", "", "Where the time went (ms)"]
    lines += [f"  {line}" for line in time_table(outcome)]
    lines += ["", "Outside the times above (s)"]
    lines += [f"  {line}" for line in table(setup_rows(outcome), right=(1, 2, 3, 4, 5))]
    sizes = f"{size(stored.raw_bytes)} raw, {size(stored.stored_bytes)} stored"
    codec = f"codec {stored.codec}, {ratio(stored.raw_bytes, stored.stored_bytes)}x"
    lines += [
        "",
        f"Stored: {stored.blocks} blocks of {stored.block_tokens} tokens, {sizes} ({codec})",
        f"Where:  {stored.path} (LMDB; look into it: kvstore stat {stored.path})",
        f"With:   {', '.join(f'{name} {value}' for name, value in outcome.computed.machine.items())}",
        *_caution(outcome),
        "",
    ]
    lines += [
        f"{check.name + ':':<18}{'yes' if check.passed else 'NO'}  ({check.detail})" for check in outcome.checks()
    ]
    return [*lines, "", *(f"Report: {file}" for file in files)]


def _caution(outcome: Outcome) -> list[str]:
    """What a reader should know about the cold time."""
    machine = outcome.computed.machine
    if machine["dtype"] != "bfloat16" or machine.get("CPU bfloat16") != "emulated":
        return []
    return ["        Computing is slow here: this CPU emulates bfloat16. --dtype float32 shows the other comparison."]


def opening_note(outcome: Outcome) -> str:
    """What the restored time is, and what it was when the store was opened again."""
    again = ", ".join(f"{seconds * 1000:,.0f}" for seconds in outcome.restored.ttfts_s[1:])
    return f"first opening after the restart; opened again: {again} ms"


def time_table(outcome: Outcome) -> list[str]:
    """Each answer's tokens and times, aligned."""
    return table(time_rows(outcome), right=(1, 2, 3, 4, 5, 6))


def time_rows(outcome: Outcome) -> list[list[str]]:
    """Heading and one row per timed prompt."""
    first, second = outcome.restored.answers
    return [
        ["", "tokens restored", "computed", "restore", "inject", "compute", "first token"],
        _time_row("run 1, question 1, empty store", outcome.computed.answer),
        _time_row("run 2, question 1, restored", first),
        _time_row("run 2, question 2, restored", second),
        _time_row("run 2, question 1, without store", outcome.restored.recomputed),
    ]


def setup_rows(outcome: Outcome) -> list[list[str]]:
    """Heading and one row per process: what came before the first answer."""
    heading = ["", "imports", "model load", "fingerprint", "cache open", "warm-up"]
    return [heading, _setup_row("run 1", outcome.computed.setup), _setup_row("run 2", outcome.restored.setup)]


def _answers(outcome: Outcome) -> list[str]:
    lines = []
    for answer in outcome.restored.answers:
        lines += [f"Q: {answer.question}", f"A: {answer.text}", ""]
    return lines


def _bars(outcome: Outcome) -> list[str]:
    longest = max(outcome.cold_s, outcome.restored_s)
    return [
        f"{name:<9}{seconds * 1000:>9,.0f} ms  {'#' * max(1, round(_BAR_WIDTH * seconds / longest))}"
        for name, seconds in (("computed", outcome.cold_s), ("restored", outcome.restored_s))
    ]


def _time_row(name: str, answer: Answer) -> list[str]:
    seconds = (answer.restore_s, answer.inject_s, answer.compute_s, answer.ttft_s)
    counts = [f"{answer.restored_tokens:,}", f"{answer.computed_tokens:,}"]
    return [name, *counts, *(f"{value * 1000:,.1f}" for value in seconds)]


def _setup_row(name: str, setup: Setup) -> list[str]:
    seconds = (setup.import_s, setup.load_s, setup.fingerprint_s, setup.open_s, setup.warmup_s)
    return [name, *(f"{value:.2f}" for value in seconds)]
