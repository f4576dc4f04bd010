"""``kvstore verify``: read every record of a store and check all its checksums."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.cli.command import Command, Subcommands, add_command, add_store_arguments, store_exit_code
from kvstore.cli.output import plural, print_json, progress, size
from kvstore.errors import CorruptRecordError

if TYPE_CHECKING:
    from kvstore.backend import RecordInfo
    from kvstore.cli.store import Store

_DESCRIPTION = """\
Reads every record of a store and checks it: structure, every checksum, and that it is stored under
the name it was made for. Changes nothing, so that it may run beside the processes that use the
store; only --drop-corrupt opens the store for writing and drops what failed, which costs those
blocks and nothing else. Ends with exit code 1 when there were corrupt records."""

_SHOWN = 20  # corrupt records listed one by one for people; --json has all


@dataclass(slots=True)
class _Scrub:
    """Counts of one store."""

    store: Store
    advance: Callable[[int], None]
    sound: int = 0
    nbytes: int = 0
    corrupt: list[dict[str, Any]] = field(default_factory=list)
    suspects: list[tuple[bytes, int]] = field(default_factory=list)

    def visit(self, info: RecordInfo, view: memoryview) -> None:
        self.nbytes += view.nbytes
        try:
            _check(info.name, view)
        except CorruptRecordError as e:
            self.corrupt.append({"name": info.name.hex(), "reason": e.reason, "detail": str(e)})
            self.suspects.append((info.name, int.from_bytes(view[184:192], "little")))
        else:
            self.sound += 1
        self.advance(1)


def _check(name: bytes, view: memoryview) -> None:
    from kvstore.record import verify_record

    head = verify_record(view)
    if head.digest != name[17:]:
        raise CorruptRecordError("key", f"holds the block {head.digest.hex()}")


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="verify",
            summary="check every record of a store",
            description=_DESCRIPTION,
            examples=(
                ("kvstore verify ~/.cache/llm-kvstore/demo-store/lmdb", "scrub what the demo stored"),
                ("kvstore verify --config kvstore.toml --tier lmdb", "one tier of a config"),
                ("kvstore verify kvstore.toml --drop-corrupt", "and drop what is damaged"),
            ),
            run=_run,
        ),
    )
    add_store_arguments(parser)
    parser.add_argument(
        "--drop-corrupt", action="store_true", help="drop the records that fail; the only way to change"
    )


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.store import open_stores

    reports = [_verify(store, drop=args.drop_corrupt) for store in open_stores(args, read_only=not args.drop_corrupt)]
    if args.json:
        print_json(reports)
    else:
        print("\n".join(line for report in reports for line in _lines(report)))
    return store_exit_code(
        corrupt=any(report["corrupt"] for report in reports), unread=any(report["unread"] for report in reports)
    )


def _verify(store: Store, *, drop: bool) -> dict[str, Any]:
    from kvstore.cli.store import read_all, unread
    from kvstore.types import ReadStatus

    started = time.monotonic()
    with progress(f"verify {store.tier.name}", store.backend.usage().records) as advance:
        scrub = _Scrub(store, advance)
        statuses = read_all(store.backend, scrub.visit)
    if drop:
        for name, header_checksum in scrub.suspects:
            store.backend.discard(name, header_checksum)
    return {
        "tier": store.tier.name,
        "records": scrub.sound + len(scrub.corrupt),
        "sound": scrub.sound,
        "corrupt": scrub.corrupt,
        "dropped": len(scrub.suspects) if drop else 0,
        "vanished": statuses[ReadStatus.ABSENT],
        "unread": unread(statuses),
        "bytes": scrub.nbytes,
        "seconds": round(time.monotonic() - started, 3),
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    corrupt = report["corrupt"]
    verdict = f"{len(corrupt):,} corrupt" if corrupt else "all sound"
    read = f"{size(report['bytes'])} in {report['seconds']:.1f} s"
    yield f"tier {report['tier']!r}: {plural(report['records'], 'record')} checked, {verdict} ({read})"
    for reason, count in Counter(record["reason"] for record in corrupt).items():
        yield f"  {plural(count, 'record')}: {reason}"
    for record in corrupt[:_SHOWN]:
        yield f"  {record['name'][34:50]}  {record['detail']}"
    if len(corrupt) > _SHOWN:
        yield f"  and {len(corrupt) - _SHOWN:,} more; --json lists all"
    if report["dropped"]:
        yield f"  dropped {plural(report['dropped'], 'record')}"
    elif corrupt:
        yield "  nothing was changed; readers treat these records as misses. --drop-corrupt removes them"
    if report["vanished"]:
        yield f"  {plural(report['vanished'], 'record')} left the store during the check"
    if report["unread"]:
        yield f"  {plural(report['unread'], 'record')} could not be read: the medium did not answer"
