"""Runs the demo: one process computes and stores, a new one restores, the parent compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK
from kvstore.cli.demo.facts import Computed, Outcome, Restored
from kvstore.cli.demo.model import find_source, is_converted, model_folder
from kvstore.cli.demo.options import DemoOptions, options_of
from kvstore.cli.demo.processes import run_phase
from kvstore.cli.demo.store import empty_store
from kvstore.cli.output import print_json
from kvstore.private_files import make_private_directory

Say = Callable[[str], None]


def run(args: argparse.Namespace) -> int:
    """Run the demo and return an exit code: 0 green, 1 a check failed.

    Raises:
        ConfigError: An option is out of range, or something that the demo needs is not installed.
        DemoError: A process of the demo failed.
    """
    options = options_of(args)
    with empty_store(options.store) as store:
        return _synthetic(options, store) if options.synthetic else _real(options, store)


def _real(options: DemoOptions, store: Path) -> int:
    source, folder = find_source(), model_folder()
    if not is_converted(source, folder):
        with _spoken("model", options) as say:
            run_phase("convert", {"model": str(folder)}, on_step=say, show_stderr=sys.stderr.isatty())
    job: dict[str, Any] = {
        "model": str(folder),
        "store": str(store),
        "tokens": options.tokens,
        "new_tokens": options.new_tokens,
        "dtype": options.dtype,
    }
    with _spoken("run 1", options) as say:
        computed = Computed.from_json(run_phase("compute", job, on_step=say))
    with _spoken("run 2", options) as say:
        restored = Restored.from_json(run_phase("restore", job, on_step=say))
    outcome = Outcome(computed, restored, options.min_ratio)
    return _report(options, outcome)


def _report(options: DemoOptions, outcome: Outcome) -> int:
    from kvstore.cli.demo.html import write_html
    from kvstore.cli.demo.png import write_png
    from kvstore.cli.demo.text import report_lines

    make_private_directory(options.report)
    files = [write_html(outcome, options.report / "report.html")]
    files += write_png(outcome, options.report / "report.png")
    green = all(check.passed for check in outcome.checks())
    if options.as_json:
        _print_json(outcome, files)
    else:
        print("\n".join(report_lines(outcome, files)))
    return EXIT_OK if green else EXIT_FINDINGS


def _print_json(outcome: Outcome, files: list[Path]) -> None:
    document = {
        **asdict(outcome),
        "cold_s": outcome.cold_s,
        "restored_s": outcome.restored_s,
        "ratio": outcome.ratio,
        "checks": [asdict(check) for check in outcome.checks()],
        "files": [str(file) for file in files],
    }
    print_json(document)


def _synthetic(options: DemoOptions, store: Path) -> int:
    from kvstore.cli.demo.synthetic import N_BLOCKS, synthetic_lines, verdict

    job = {"store": str(store), "n_blocks": N_BLOCKS}
    with _spoken("run 1", options) as say:
        put = run_phase("synthetic-put", job, on_step=say)
    with _spoken("run 2", options) as say:
        restored = run_phase("synthetic-restore", job, on_step=say)
    if options.as_json:
        print_json({"put": put, "restored": restored, "checks": [asdict(c) for c in verdict(put, restored)]})
    else:
        print("\n".join(synthetic_lines(put, restored)))
    return EXIT_OK if all(check.passed for check in verdict(put, restored)) else EXIT_FINDINGS


@contextmanager
def _spoken(name: str, options: DemoOptions) -> Iterator[Say]:
    """Show what a phase is doing on standard error: a live line on a terminal, lines elsewhere."""
    if not options.as_json and sys.stderr.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            with Console(stderr=True).status(name) as status:
                yield lambda step: status.update(f"{name}: {step}")
            return
    yield lambda step: print(f"{name}: {step}", file=sys.stderr, flush=True)
