"""``kvstore gc``: delete what was not used for long, or the oldest beyond a size."""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from kvstore.cli.command import EXIT_OK, Command, Subcommands, add_command, add_store_arguments, bytes_argument
from kvstore.cli.output import plural, print_json, progress, size
from kvstore.errors import ConfigError, NotSupportedError

if TYPE_CHECKING:
    from kvstore.backend import Backend
    from kvstore.cli.collect import Limits
    from kvstore.cli.store import Store

_DESCRIPTION = """\
Deletes records that were not used for longer than a time, or the least recently used ones until the
rest fits into a size. For media that do not evict by themselves, such as buckets, and for making
room by hand; lmdb and nvme keep their capacity without it. May run beside the processes that use
the store: what is deleted is a miss for them. --dry-run says what would go and deletes nothing."""

_DAYS: Final = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>d|w)", re.ASCII)
_DAY_S: Final = {"d": 86_400.0, "w": 7 * 86_400.0}


@runtime_checkable
class Collecting(Protocol):
    """A backend that collects by itself, because it knows a cheaper way than listing records."""

    def gc(self, *, max_age_s: float | None = None, max_bytes: int | None = None) -> tuple[int, int]:
        """Delete what is beyond the limits; return how many records went and their bytes."""
        ...


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="gc",
            summary="delete records by age, or down to a size",
            description=_DESCRIPTION,
            examples=(
                ("kvstore gc kvstore.toml --tier s3 --older-than 7d", "what nobody used for a week"),
                ("kvstore gc kvstore.toml --tier s3 --max-bytes 500GiB", "the oldest, until the rest fits"),
                ("kvstore gc kvstore.toml --older-than 12h --dry-run", "how much would go, in every tier"),
            ),
            run=_run,
        ),
    )
    add_store_arguments(parser)
    parser.add_argument("--older-than", type=_age, metavar="TIME", help="not used for this time: 12h, 7d, 4w")
    parser.add_argument(
        "--max-bytes", type=bytes_argument, metavar="SIZE", help="keep at most this much of each tier: 10GiB"
    )
    parser.add_argument("--dry-run", action="store_true", help="delete nothing, only say what would go")


def _age(text: str) -> float:
    from kvstore.config.units import parse_seconds

    days = _DAYS.fullmatch(text.strip())
    if days is not None:
        return float(days["number"]) * _DAY_S[days["unit"]]
    try:
        return parse_seconds(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as in 30min, 12h, 7d or 4w") from e


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.collect import Limits
    from kvstore.cli.store import open_stores

    if args.older_than is None and args.max_bytes is None:
        raise ConfigError("nothing says what to delete; give --older-than, --max-bytes or both")
    limits = Limits(args.older_than, args.max_bytes)
    reports = []
    for store in open_stores(args, read_only=args.dry_run):
        try:
            reports.append(_collect(store, limits, dry_run=args.dry_run))
        except NotSupportedError as e:
            print(f"kvstore: tier {store.tier.name!r} is passed over: {e}", file=sys.stderr)
    if not reports:
        raise NotSupportedError("no tier can be collected: none of them lists its records")
    if args.json:
        print_json(reports)
    else:
        print("\n".join(_line(report) for report in reports))
    return EXIT_OK


def _collect(store: Store, limits: Limits, *, dry_run: bool) -> dict[str, Any]:
    started = time.monotonic()
    backend = store.backend
    collected = _by_itself(backend, limits) if not dry_run else None
    deleted, deleted_bytes = collected or _by_listing(store, limits, dry_run=dry_run)
    usage = backend.usage()
    return {
        "tier": store.tier.name,
        "dry_run": dry_run,
        "deleted": deleted,
        "deleted_bytes": deleted_bytes,
        "records": usage.records,
        "payload_bytes": usage.payload_bytes,
        "seconds": round(time.monotonic() - started, 3),
    }


def _by_itself(backend: Backend, limits: Limits) -> tuple[int, int] | None:
    if not isinstance(backend, Collecting):
        return None
    try:
        return backend.gc(max_age_s=limits.max_age_s, max_bytes=limits.max_bytes)
    except NotSupportedError:  # of a backend with several layouts, not all can
        return None


def _by_listing(store: Store, limits: Limits, *, dry_run: bool) -> tuple[int, int]:
    from kvstore.cli.collect import delete, select

    backend = store.backend
    with progress(f"list {store.tier.name}", backend.usage().records) as advance:
        found = select(backend, limits, advance)
    if dry_run:
        return len(found.victims), found.victim_bytes
    with progress(f"delete in {store.tier.name}", len(found.victims)) as advance:
        return delete(backend, found.victims, advance), found.victim_bytes


def _line(report: dict[str, Any]) -> str:
    verb = "would delete" if report["dry_run"] else "deleted"
    gone = f"{plural(report['deleted'], 'record')} ({size(report['deleted_bytes'])})"
    left = f"{plural(report['records'], 'record')} ({size(report['payload_bytes'])})"
    return f"tier {report['tier']!r}: {verb} {gone} in {report['seconds']:.1f} s; it holds {left} now"
