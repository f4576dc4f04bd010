"""``kvstore init``: write a config in which every setting is explained."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from kvstore.cli.command import EXIT_OK, Command, Subcommands, add_command
from kvstore.cli.output import print_json
from kvstore.errors import ConfigError
from kvstore.private_files import write_private_file

DEFAULT_FILE: Final = "kvstore.toml"
DEFAULT_STORE: Final = "~/.cache/llm-kvstore/store"

_DESCRIPTION = """\
Writes a TOML config with one tier behind the cache in memory. Every setting is in it with what it
means and its default, commented out, so that you change what you want and see what you left. Opens
no store and creates nothing but the file, which only you may read; an existing file is left alone
unless you say --force."""


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="init",
            summary="write a config with every setting explained",
            description=_DESCRIPTION,
            examples=(
                ("kvstore init", f"{DEFAULT_FILE} here, for an embedded LMDB store in {DEFAULT_STORE}"),
                ("kvstore init /etc/kvstore.toml --path /var/lib/kvstore", "another file and another store"),
                ("kvstore init - --backend s3", "print it instead, for another backend"),
            ),
            run=_run,
        ),
    )
    parser.add_argument(
        "file", nargs="?", default=DEFAULT_FILE, metavar="FILE", help=f'file to write, "-" prints it ({DEFAULT_FILE})'
    )
    parser.add_argument("--backend", default="lmdb", metavar="NAME", help="backend plugin of the tier (lmdb)")
    parser.add_argument("--path", metavar="DIR", help=f"directory of the store ({DEFAULT_STORE})")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def _run(args: argparse.Namespace) -> int:
    from kvstore.config import render_template
    from kvstore.plugins import Registry
    from kvstore.plugins.options import option_fields

    registry = Registry.discover()
    path = args.path
    options = option_fields(registry.backend(args.backend).options)
    if path is None and any(option.name == "path" for option in options):
        path = DEFAULT_STORE
    text = render_template(args.backend, path, registry=registry)
    if args.file == "-":
        print_json({"config": text}) if args.json else print(text, end="")
        return EXIT_OK
    _write(Path(args.file), text, force=args.force)
    if args.json:
        print_json({"file": str(Path(args.file).absolute()), "backend": args.backend, "path": path})
        return EXIT_OK
    print(f"wrote {args.file}")
    placeholders = [option.name for option in options if option.required and option.name != "path"]
    if placeholders:
        print(f"first: replace what it says for {', '.join(placeholders)}")
    print(f"next: look through it, then  kvstore config check {args.file}  and  kvstore doctor {args.file}")
    print(f'then: KVCache.open("{args.file}", spec=..., namespace=...), or export KVSTORE_CONFIG={args.file}')
    return EXIT_OK


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        write_private_file(path, text.encode(), replace=force)  # it may come to hold credentials
    except FileExistsError as e:
        msg = f"{path} exists and was left alone; say --force to replace it, or name another file"
        raise ConfigError(msg) from e
    except OSError as e:
        msg = f"{path} cannot be written: {e.strerror}; name a file in a directory that exists and is yours"
        raise ConfigError(msg) from e
