"""``kvstore config check``: the settings in force, and where each one comes from."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from kvstore.cli.command import EXIT_OK, Command, Subcommands, add_command, add_group
from kvstore.cli.output import plural, print_json, table

_GROUP_DESCRIPTION = """\
A config is a TOML file with three kinds of sections: [l1] for the cache in memory, [defaults], and
one [[l2]] per tier behind it, in the order in which they are asked."""

_DESCRIPTION = """\
Reads a config exactly as KVCache.open would, with the plugins that it names, and prints every
setting with its value and where that comes from: the file, the default, or the plugin's default.
Opens no tier, reaches no network and creates nothing. A wrong config ends with exit code 2 and a
message that names the key, its value, and what was expected. Secrets are not shown."""


def add_to(commands: Subcommands) -> None:
    """Add the command group."""
    group = add_group(
        commands,
        "config",
        "check a config and see what it means",
        _GROUP_DESCRIPTION,
        (("kvstore config check kvstore.toml", "what the config means, or what is wrong with it"),),
    )
    actions = group.add_subparsers(title="actions", metavar="ACTION", dest="action")
    parser = add_command(
        actions,
        Command(
            name="check",
            summary="print effective settings, or what is wrong",
            description=_DESCRIPTION,
            examples=(
                ("kvstore config check kvstore.toml", "effective settings with their origin"),
                ("KVSTORE_CONFIG=kvstore.toml kvstore config check", "the file that applications would read"),
                ("kvstore config check kvstore.toml --json | jq '.settings[] | select(.origin==\"file\")'", "your own"),
            ),
            run=_run,
        ),
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="config to check (the one that KVSTORE_CONFIG names)")


def _run(args: argparse.Namespace) -> int:
    from kvstore.config import effective, load_config

    config = load_config(args.file)
    settings = effective(config)
    if args.json:
        print_json({"source": config.source, "settings": [asdict(setting) for setting in settings]})
        return EXIT_OK
    print(f"{config.source}: {plural(len(config.l2), 'tier')} behind L1, all settings are valid")
    rows = [(setting.path, "=", setting.text, f"# {setting.origin}") for setting in settings]
    print("\n".join(table([*rows])))
    return EXIT_OK
