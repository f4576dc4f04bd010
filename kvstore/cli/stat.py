"""``kvstore stat``: what lies in a store at rest, by namespace."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.cli.command import Command, Subcommands, add_command, add_store_arguments, store_exit_code
from kvstore.cli.namespaces import identity_lines, read_documents
from kvstore.cli.output import age, plural, print_json, progress, ratio, size
from kvstore.cli.records import Known, LivePrefixes, orphans
from kvstore.errors import CorruptRecordError

if TYPE_CHECKING:
    from kvstore.backend import RecordInfo
    from kvstore.cli.store import Store

_DESCRIPTION = """\
Sums up a store: where it lies, how full it is, and for each namespace (one model, one block layout)
how many records and tokens it holds, their raw and stored bytes, their codecs, when they were written
and last used, and how many of them no prompt reaches. Reads the head of every record. The store is
opened read-only, also while other processes use it."""


@dataclass(slots=True)
class _Sum:
    """Totals of one namespace; times are Unix seconds, None where the medium knows none."""

    records: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    cleared: int = 0
    orphans: int = 0
    orphaned_bytes: int = 0
    oldest: int = 0
    newest: int = 0
    first_use: float | None = None
    last_use: float | None = None
    codecs: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Tally:
    """Totals of one store."""

    store: Store
    prefixes: LivePrefixes
    namespaces: dict[bytes, _Sum] = field(default_factory=dict)
    corrupt: int = 0
    reachable: dict[bytes, Known] = field(default_factory=dict)

    def visit(self, info: RecordInfo, view: memoryview) -> None:
        from kvstore.record import parse_head

        try:
            head = parse_head(view, info.nbytes)
        except CorruptRecordError:
            self.corrupt += 1
            return
        total = self.namespaces.setdefault(head.namespace, _Sum())
        total.records += 1
        total.tokens += head.block_tokens
        total.raw_bytes += head.raw_bytes
        total.stored_bytes += info.nbytes
        total.oldest = min(total.oldest or head.created, head.created)
        total.newest = max(total.newest, head.created)
        if info.last_use:
            total.first_use = min(total.first_use or info.last_use, info.last_use)
            total.last_use = max(total.last_use or 0.0, info.last_use)
        codec = self.store.codec_name(head.codec_id)
        total.codecs[codec] = total.codecs.get(codec, 0) + 1
        if self.prefixes.cleared(head.namespace, info.name):
            total.cleared += 1
        else:
            self.reachable[info.name] = Known.of(info, head)

    def count_orphans(self) -> None:
        """Find the records whose beginning is gone, so that no prompt reaches them."""
        for record in orphans(self.reachable):
            total = self.namespaces[record.namespace]
            total.orphans += 1
            total.orphaned_bytes += record.nbytes


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="stat",
            summary="sum up a store: records, bytes, codecs by namespace",
            description=_DESCRIPTION,
            examples=(
                ("kvstore stat ~/.cache/llm-kvstore/demo-store/lmdb", "what the demo stored"),
                ("kvstore stat --config kvstore.toml", "every tier of a config"),
                ("kvstore stat kvstore.toml --json | jq '.[].usage'", "for programs"),
            ),
            run=_run,
        ),
    )
    add_store_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.store import open_stores

    reports = [_stat(store) for store in open_stores(args)]
    if args.json:
        print_json(reports)
    else:
        print("\n".join(line for report in reports for line in _lines(report)))
    return store_exit_code(
        corrupt=any(report["corrupt"] for report in reports), unread=any(report["unread"] for report in reports)
    )


def _stat(store: Store) -> dict[str, Any]:
    from kvstore.cli.store import read_heads, unread

    usage = store.backend.usage()
    tally = _Tally(store, LivePrefixes(store.backend))
    with progress(f"stat {store.tier.name}", usage.records) as advance:

        def visit(info: RecordInfo, view: memoryview) -> None:
            tally.visit(info, view)
            advance(1)

        statuses = read_heads(store.backend, visit)
    tally.count_orphans()
    documents = read_documents(store, tally.namespaces)
    return {
        "tier": store.tier.name,
        "backend": store.tier.backend,
        "usage": asdict(usage),
        "facts": store.backend.describe(),
        "namespaces": [
            {"namespace": digest.hex(), **asdict(total), "description": documents.get(digest.hex())}
            for digest, total in tally.namespaces.items()
        ],
        "corrupt": tally.corrupt,
        "unread": unread(statuses),
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    usage = report["usage"]
    yield f"tier {report['tier']!r} ({report['backend']})"
    bound = f" of {size(usage['capacity_bytes'])}" if usage["capacity_bytes"] else ""
    records = report["corrupt"] + sum(entry["records"] for entry in report["namespaces"])
    yield f"  {plural(records, 'record')} take {size(usage['payload_bytes'])}{bound}"
    if usage["file_bytes"]:
        yield f"  files: {size(usage['file_bytes'])}"
    for name, value in report["facts"].items():
        yield f"  {name}: {value}"
    for entry in report["namespaces"]:
        yield f"  namespace {entry['namespace']}"
        yield from (f"    {line}" for line in _namespace_lines(entry))
    if report["corrupt"]:
        yield f"  {plural(report['corrupt'], 'record')} with a damaged head; kvstore verify tells more"
    if report["unread"]:
        yield f"  {plural(report['unread'], 'record')} could not be read: the medium did not answer"


def _namespace_lines(entry: dict[str, Any]) -> Iterator[str]:
    yield from identity_lines(entry["description"])
    yield f"{plural(entry['records'], 'record')}, {plural(entry['tokens'], 'token')}"
    raw, stored = entry["raw_bytes"], entry["stored_bytes"]
    yield f"raw {size(raw)}, stored {size(stored)}, ratio {ratio(raw, stored)}"
    yield "codecs: " + ", ".join(f"{name} {count:,}" for name, count in sorted(entry["codecs"].items()))
    now = time.time()
    first, last = age(now - entry["oldest"]), age(now - entry["newest"])
    yield f"written {last} ago" if first == last else f"written between {first} and {last} ago"
    if entry["last_use"] is not None:
        earliest, latest = age(now - entry["first_use"]), age(now - entry["last_use"])
        yield f"used {latest} ago" if earliest == latest else f"last used between {earliest} and {latest} ago"
    if entry["orphans"]:
        gone = f"{plural(entry['orphans'], 'record')} ({size(entry['orphaned_bytes'])})"
        yield f"orphaned: {gone} whose beginning is gone, so that no prompt reaches them"
    if entry["cleared"]:
        yield f"{plural(entry['cleared'], 'record')} of these were cleared and wait for their space to be reclaimed"
