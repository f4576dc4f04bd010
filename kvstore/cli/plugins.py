"""``kvstore plugins list`` and ``kvstore plugins check NAME``."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, Command, Subcommands, add_command, add_group
from kvstore.cli.output import print_json, table
from kvstore.errors import PluginError

_GROUP_DESCRIPTION = """\
Backends, codecs and eviction policies are plugins: a distribution announces them under the
entry-point group "kvstore", and a config selects them by name. Only plugins that a config names
are imported, so a broken one that nobody uses does no harm; these commands show it all the same."""

_LIST_DESCRIPTION = """\
Lists every plugin name that an installed distribution announces, with its state. Without --load
nothing is imported, and plugins show as "installed"; with --load each one is imported and checked,
and shows as active, broken or incompatible. Two distributions that claim one name show as a
conflict, with both their names."""

_CHECK_DESCRIPTION = """\
Imports one plugin, makes one object from each of its factories and compares its methods with the
contract. Opens no store and changes nothing. Ends with exit code 1 when something is wrong, so that
a plugin's own CI can call it."""


def add_to(commands: Subcommands) -> None:
    """Add the command group."""
    group_examples = (
        ("kvstore plugins list", "what is installed"),
        ("kvstore plugins check lmdb", "whether one plugin would work"),
    )
    group = add_group(commands, "plugins", "list and check installed plugins", _GROUP_DESCRIPTION, group_examples)
    actions = group.add_subparsers(title="actions", metavar="ACTION", dest="action")
    listing = add_command(
        actions,
        Command(
            name="list",
            summary="every installed plugin with its state",
            description=_LIST_DESCRIPTION,
            examples=(
                ("kvstore plugins list", "names and where they come from, at once"),
                ("kvstore plugins list --load", "import each one; exit code 1 when one cannot be used"),
                ("kvstore plugins list --json | jq '.[].name'", "for programs"),
            ),
            run=_list,
        ),
    )
    listing.add_argument(
        "--load", action="store_true", help="import every plugin to learn its state and what it provides"
    )
    checking = add_command(
        actions,
        Command(
            name="check",
            summary="import one plugin and compare it with the contract",
            description=_CHECK_DESCRIPTION,
            examples=(
                ("kvstore plugins check zstd", "a plugin that comes with kvstore"),
                ("kvstore plugins check my-backend --debug", "your own, with the traceback of what is wrong"),
            ),
            run=_check,
        ),
    )
    checking.add_argument("name", metavar="NAME", help="plugin name, as in: kvstore plugins list")


def _list(args: argparse.Namespace) -> int:
    from kvstore.plugins import Registry

    registry = Registry.discover()
    failed = False
    if args.load:
        for info in registry.list():
            try:
                registry.load(info.name)
            except PluginError:  # the list shows why
                failed = True
    infos = registry.list()
    if args.json:
        print_json([asdict(info) for info in infos])
    else:
        rows = [("NAME", "STATE", "PROVIDES", "FROM", "DETAIL")]
        rows += [
            (i.name, i.status, ", ".join(i.kinds) or "-", f"{i.distribution} {i.version}", i.detail) for i in infos
        ]
        print("\n".join(table(rows)))
    return EXIT_FINDINGS if failed else EXIT_OK


def _check(args: argparse.Namespace) -> int:
    from kvstore.plugins import Registry

    findings = Registry.discover().check(args.name)
    if args.json:
        print_json([asdict(finding) for finding in findings])
    else:
        print("\n".join(table([("ok" if f.ok else "BAD", f.subject, f.detail) for f in findings])))
    return EXIT_OK if all(finding.ok for finding in findings) else EXIT_FINDINGS
