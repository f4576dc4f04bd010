"""``python -m kvstore_s3 lifecycle CONFIG``: show or set the expiry of a tier's objects."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvstore.config import load_config
from kvstore.errors import ConfigError, KVStoreError
from kvstore_s3.access import Access
from kvstore_s3.errors import S3Error, translate
from kvstore_s3.lifecycle import folder, lifecycle_rules, refresh_advice, set_lifecycle
from kvstore_s3.opening import where
from kvstore_s3.options import S3Options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, 2 for a wrong config and 3 for a bucket that refuses."""
    args = _parser().parse_args(arguments)
    try:
        options = _tier(args.config, args.tier)
        access = Access(options)
        try:
            if args.days is not None:
                set_lifecycle(access, options, args.days)
            _show(access, options)
        finally:
            access.close()
    except S3Error as e:
        print(f"error: {translate(e, 'lifecycle', args.config or 'KVSTORE_CONFIG')}", file=sys.stderr)  # noqa: T201
        return 3
    except KVStoreError as e:
        print(f"error: {e}", file=sys.stderr)  # noqa: T201 - a command prints
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvstore_s3", description="Tasks around buckets.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    lifecycle = commands.add_parser(
        "lifecycle",
        help="show or set when the objects of a tier expire",
        description="Shows the bucket's lifecycle rules that expire objects of a tier, or sets kvstore's own.",
    )
    lifecycle.add_argument("config", nargs="?", metavar="CONFIG", help="config (the one that KVSTORE_CONFIG names)")
    lifecycle.add_argument("--tier", metavar="NAME", help="which tier, when the config has several in S3")
    lifecycle.add_argument("--days", type=int, metavar="N", help="expire objects after N days; 0 removes the rule")
    return parser


def _tier(config: str | None, name: str | None) -> S3Options:
    loaded = load_config(config)
    found = [tier for tier in loaded.l2 if tier.backend == "s3" and name in {None, tier.name}]
    if len(found) != 1:
        what = f"tier {name!r}" if name else f"{len(found)} tiers with backend 's3'"
        names = ", ".join(tier.name for tier in loaded.l2 if tier.backend == "s3") or "none"
        raise ConfigError(f"{loaded.source}: {what}; expected --tier to name one of: {names}")
    options: S3Options = found[0].options
    return options


def _show(access: Access, options: S3Options) -> None:
    rules = lifecycle_rules(access, options)
    covering = [rule for rule in rules if rule.covers(options)]
    print(f"{where(options)}, keys {folder(options)}*")  # noqa: T201
    for rule in covering:
        print(f"  expire after {rule.days} days (rule {rule.name!r}, prefix {rule.prefix!r})")  # noqa: T201
    if not covering:
        print("  never expire: the bucket grows until something else removes them")  # noqa: T201
    advice = refresh_advice(options, rules)
    if advice:
        print(f"  advice: {advice}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
