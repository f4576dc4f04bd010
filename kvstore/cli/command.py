"""What every subcommand has in common: options, help layout, exit codes."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.errors import BackendError, ConfigError, KVStoreError, PluginError

# argparse has no public name for what add_subparsers() returns.
Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001

EXIT_OK: Final = 0
EXIT_FINDINGS: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

EXIT_CODES: Final = {
    EXIT_OK: "success",
    EXIT_FINDINGS: "findings (such as corrupt records), or the work failed",
    EXIT_USAGE: "wrong usage, wrong config, or a plugin that cannot be used",
    EXIT_UNAVAILABLE: "a tier cannot be opened or does not answer",
    EXIT_INTERRUPTED: "interrupted from the keyboard",
}

_WIDTH: Final = 92


@dataclass(frozen=True, slots=True)
class Command:
    """Help texts and entry point of one subcommand.

    Attributes:
        name: As typed.
        summary: One line for the list of commands.
        description: What it does, what it needs, what it never does; one paragraph.
        examples: Command lines, each with what it is for.
        run: Does the work and returns an exit code.
    """

    name: str
    summary: str
    description: str
    examples: Sequence[tuple[str, str]]
    run: Callable[[argparse.Namespace], int]


def add_command(commands: Subcommands, command: Command) -> argparse.ArgumentParser:
    """Add a subcommand with ``--json`` and ``--debug`` to a parser."""
    parser = add_group(commands, command.name, command.summary, command.description, command.examples)
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text for people")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=command.run)
    return parser


def add_group(
    commands: Subcommands, name: str, summary: str, description: str, examples: Sequence[tuple[str, str]]
) -> argparse.ArgumentParser:
    """Add a parser that only holds subcommands, or the shell of one that runs."""
    return commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _WIDTH),
        epilog=example_text(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def store_exit_code(*, corrupt: bool, unread: bool) -> int:
    """Exit code of a command that read a store: damage that was found counts before what nobody could read."""
    if corrupt:
        return EXIT_FINDINGS
    return EXIT_UNAVAILABLE if unread else EXIT_OK


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which store a command looks into."""
    parser.add_argument(
        "store", nargs="?", metavar="STORE", help="config file, or directory of a store (same as --config)"
    )
    add_store_options(parser)


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Add them without STORE itself."""
    parser.add_argument("--config", metavar="FILE", help="config file (the one that KVSTORE_CONFIG names)")
    parser.add_argument("--tier", metavar="NAME", help="only this tier of the config")
    parser.add_argument("--backend", metavar="NAME", help="backend when STORE is a directory (lmdb)")


def count_argument(text: str) -> int:
    """Read an argument that counts something.

    Raises:
        argparse.ArgumentTypeError: It is no whole number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def bytes_argument(text: str) -> int:
    """Read an argument that is a size.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    from kvstore.config.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no size ({e}); write it as in 500MiB or 10GiB") from e


def example_text(examples: Sequence[tuple[str, str]]) -> str:
    """Lay out command lines for the end of a help page."""
    lines = ["examples:"]
    for line, purpose in examples:
        lines += [f"  # {purpose}", f"  {line}"]
    return "\n".join(lines)


def exit_code_of(error: KVStoreError) -> int:
    """The exit code that an error leads to."""
    if isinstance(error, ConfigError | PluginError):
        return EXIT_USAGE
    if isinstance(error, BackendError):
        return EXIT_UNAVAILABLE
    return EXIT_FINDINGS
