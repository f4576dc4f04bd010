"""``kvstore ls``: the records of a store at rest."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.cli.command import (
    Command,
    Subcommands,
    add_command,
    add_store_arguments,
    count_argument,
    store_exit_code,
)
from kvstore.cli.output import age, plural, print_json, size, table
from kvstore.errors import CorruptRecordError

if TYPE_CHECKING:
    from kvstore.backend import RecordInfo
    from kvstore.cli.store import Store

_DESCRIPTION = """\
Lists the records of a store: which block of which sequence each one is, how it is coded, how large
it is and how old. Reads the heads of records, not their blocks; kvstore verify checks those too. The
store is opened read-only, also while other processes use it. With --json each record is one line."""

_HEADING = ("NAMESPACE", "BLOCK", "KIND", "INDEX", "TOKENS", "CODEC", "RAW", "STORED", "AGE")
_RIGHT = (3, 4, 6, 7, 8)


@dataclass(slots=True)
class _Listing:
    """Describes each record of one store to ``emit``, in the order of the scan."""

    store: Store
    emit: Callable[[dict[str, Any]], None]
    corrupt: int = 0

    def visit(self, info: RecordInfo, view: memoryview) -> None:
        from kvstore.cli.store import KINDS
        from kvstore.record import parse_head

        known = {"tier": self.store.tier.name, "name": info.name.hex(), "kind": KINDS.get(info.name[16:17][0], "?")}
        try:
            head = parse_head(view, info.nbytes)
        except CorruptRecordError as e:
            self.corrupt += 1
            self.emit(known | {"stored_bytes": info.nbytes, "corrupt": e.reason})
            return
        self.emit(
            known
            | {
                "namespace": head.namespace.hex(),
                "digest": head.digest.hex(),
                "block_index": head.block_index if head.parent_known else None,
                "group": head.group,
                "tokens": head.block_tokens,
                "codec": self.store.codec_name(head.codec_id),
                "raw_bytes": head.raw_bytes,
                "stored_bytes": info.nbytes,
                "created": head.created,
                "last_use": info.last_use or None,
            }
        )


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="ls",
            summary="list the records of a store",
            description=_DESCRIPTION,
            examples=(
                ("kvstore ls ~/.cache/llm-kvstore/demo-store/lmdb --limit 20", "what the demo stored"),
                ("kvstore ls --config kvstore.toml --tier lmdb", "all records of one tier"),
                ("kvstore ls kvstore.toml --json | jq -r .digest", "one line per record, for programs"),
            ),
            run=_run,
        ),
    )
    add_store_arguments(parser)
    parser.add_argument("--limit", type=count_argument, metavar="N", help="stop after N records of each tier")


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.store import open_stores, read_heads, unread

    corrupt = unreadable = 0
    for store in open_stores(args):
        records: list[dict[str, Any]] = []
        listing = _Listing(store, print_json if args.json else records.append)
        unreadable += unread(read_heads(store.backend, listing.visit, limit=args.limit))
        corrupt += listing.corrupt
        if not args.json:
            print("\n".join(_lines(store, records, listing.corrupt)))
    return store_exit_code(corrupt=corrupt > 0, unread=unreadable > 0)


def _lines(store: Store, records: list[dict[str, Any]], corrupt: int) -> Iterator[str]:
    yield f"tier {store.tier.name!r}: {plural(len(records), 'record')}"
    now = time.time()
    if records:
        records.sort(key=lambda record: (record.get("namespace", ""), record.get("block_index") or 0))
        yield from table([_HEADING, *(_row(record, now) for record in records)], right=_RIGHT)
    if corrupt:
        yield f"{plural(corrupt, 'record')} with a damaged head; kvstore verify tells more"


def _row(record: dict[str, Any], now: float) -> tuple[str, ...]:
    if "corrupt" in record:
        stored = size(record["stored_bytes"])
        return "?", record["name"][34:50], record["kind"], "-", "-", f"corrupt ({record['corrupt']})", "-", stored, "-"
    index = record["block_index"]
    return (
        record["namespace"][:8],
        record["digest"][:16],
        record["kind"],
        "-" if index is None else str(index),
        str(record["tokens"]),
        record["codec"],
        size(record["raw_bytes"]),
        size(record["stored_bytes"]),
        age(now - record["created"]),
    )
