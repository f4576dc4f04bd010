"""The demo's report as one HTML file: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from kvstore.cli.demo.facts import Outcome, Stored
from kvstore.cli.demo.text import opening_note, setup_rows, time_rows
from kvstore.cli.output import ratio, size
from kvstore.private_files import write_private_file

_STYLE: Final = """
:root { color-scheme: light dark; --computed: #c2410c; --restored: #0f766e; --line: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.ratio { font-size: 3rem; font-weight: 700; color: var(--restored); margin: .5rem 0 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } .words td { text-align: left; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; font: 14px system-ui, sans-serif; }
.yes { color: var(--restored); font-weight: 700; } .no { color: var(--computed); font-weight: 700; }
blockquote { border-left: 3px solid var(--restored); margin: .5rem 0; padding: .1rem 1rem; }
code { overflow-wrap: anywhere; }
"""


def write_html(outcome: Outcome, path: Path) -> Path:
    """Write the report and return its path."""
    first = outcome.restored.answers[0]
    machine = ", ".join(f"{name} {value}" for name, value in outcome.computed.machine.items())
    answers = "".join(
        f"<p>{escape(answer.question)}</p><blockquote>{escape(answer.text)}</blockquote>"
        for answer in outcome.restored.answers
    )
    body = f"""
<h1>kvstore demo</h1>
<p class="ratio">{outcome.ratio:.1f}x</p>
<p>faster to the first token after a restart: {first.restored_tokens:,} of {first.prompt_tokens:,} prompt tokens were
restored from disk by a new process, {first.computed_tokens:,} computed ({opening_note(outcome)}).</p>
{_bars(outcome)}
<h2>Proofs</h2>{_table(_proofs(outcome), kind="words")}
<h2>Where the time went (ms)</h2>{_table(time_rows(outcome)[1:], time_rows(outcome)[0])}
<h2>Stored</h2>{_table(_stored(outcome.computed.stored), kind="words")}
<h2>Outside the times above (s)</h2>{_table(setup_rows(outcome)[1:], setup_rows(outcome)[0])}
<h2>Answers of the second process</h2>{answers}
<p><small>{escape(machine)}</small></p>
"""
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kvstore demo: {outcome.ratio:.1f}x</title><style>{_STYLE}</style></head><body>{body}</body></html>
"""
    write_private_file(path, page.encode())
    return path


def _proofs(outcome: Outcome) -> list[list[str]]:
    rows = []
    for check in outcome.checks():
        word = '<span class="yes">yes</span>' if check.passed else '<span class="no">NO</span>'
        rows.append([check.name, word, escape(check.detail)])
    return rows


def _stored(stored: Stored) -> list[list[str]]:
    times = ratio(stored.raw_bytes, stored.stored_bytes)
    return [
        ["blocks", f"{stored.blocks} of {stored.block_tokens} tokens"],
        ["raw", size(stored.raw_bytes)],
        ["stored", f"{size(stored.stored_bytes)}, codec {escape(stored.codec)}, {times} times smaller"],
        ["where", f"<code>{escape(stored.path)}</code> (LMDB)"],
    ]


def _bars(outcome: Outcome) -> str:
    """Two horizontal bars on one scale."""
    longest = max(outcome.cold_s, outcome.restored_s)
    parts = []
    for i, (name, seconds) in enumerate((("computed", outcome.cold_s), ("restored", outcome.restored_s))):
        y, width = 10 + 46 * i, max(2.0, 560 * seconds / longest)
        parts.append(
            f'<text x="0" y="{y + 21}">{name}</text>'
            f'<rect x="80" y="{y}" width="{width:.1f}" height="32" rx="4" fill="var(--{name})"/>'
            f'<text x="{88 + width:.1f}" y="{y + 21}">{seconds * 1000:,.0f} ms</text>'
        )
    label = f"Time to first token: computed {outcome.cold_s:.2f} s, restored {outcome.restored_s:.3f} s"
    return f'<svg viewBox="0 0 760 102" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _table(rows: Sequence[Sequence[str]], heading: Sequence[str] = (), *, kind: str = "") -> str:
    head = f"<tr>{''.join(f'<th>{cell}</th>' for cell in heading)}</tr>" if heading else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{kind}">{head}{body}</table>'
