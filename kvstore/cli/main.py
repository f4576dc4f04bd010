"""Entry point of the ``kvstore`` command: parse, run one subcommand, turn errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import kvstore
from kvstore.cli import (
    check_config,
    demo_command,
    diff,
    doctor,
    explain,
    export,
    gc,
    import_command,
    init,
    ls,
    plugins,
    stat,
    verify,
)
from kvstore.cli.command import EXIT_CODES, EXIT_INTERRUPTED, EXIT_USAGE, example_text, exit_code_of
from kvstore.cli.output import print_json
from kvstore.errors import KVStoreError

_DESCRIPTION = """\
kvstore keeps the KV cache of language models: in memory, on disk, in object stores.

The demo shows what for. The other commands write and check configs, list plugins, and look
into stores at rest. Applications use the library: from kvstore import KVCache."""

_EXAMPLES = (
    ("kvstore demo", "see a real model skip its prefill after a restart"),
    ("kvstore init && kvstore config check kvstore.toml", "write a config with every setting explained, then check it"),
    ("kvstore stat --config kvstore.toml", "what lies in the stores of that config"),
    ("kvstore COMMAND --help", "what a command does, with examples"),
)

_ENVIRONMENT = "KVSTORE_CONFIG names the config when a command gets none."


def build_parser() -> argparse.ArgumentParser:
    """Make the parser with all subcommands; imports no storage driver and no torch."""
    codes = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog="kvstore",
        description=_DESCRIPTION,
        epilog=f"{example_text(_EXAMPLES)}\n\nexit codes:\n{codes}\n\n{_ENVIRONMENT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvstore {kvstore.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in (
        demo_command,
        init,
        check_config,
        doctor,
        plugins,
        ls,
        stat,
        explain,
        verify,
        gc,
        export,
        import_command,
        diff,
    ):
        module.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None takes them from the process.

    Returns:
        The exit code, one of :data:`kvstore.cli.command.EXIT_CODES`.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        _innermost(parser, args).print_help(sys.stderr)
        return EXIT_USAGE
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KVStoreError as e:
        if args.debug:
            raise
        return _report(e, as_json=args.json)
    except KeyboardInterrupt:
        print("kvstore: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has what it wanted. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _innermost(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the group that was named without a subcommand."""
    for action in parser._actions:  # noqa: SLF001 - argparse offers no other way to a subparser
        if isinstance(action, argparse._SubParsersAction) and args.command in action.choices:  # noqa: SLF001
            found: argparse.ArgumentParser = action.choices[args.command]
            return found
    return parser


def _report(error: KVStoreError, *, as_json: bool) -> int:
    code = exit_code_of(error)
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": str(error), "exit_code": code}})
    print(f"kvstore: {error}", file=sys.stderr)
    return code
