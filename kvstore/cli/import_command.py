"""``kvstore import``: records from an archive or another store into a store."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from kvstore.cli.command import (
    EXIT_FINDINGS,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    Command,
    Subcommands,
    add_command,
    add_store_arguments,
)
from kvstore.cli.export import STREAM, add_filters, left_lines, wanted
from kvstore.cli.output import plural, print_json, progress, size
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.cli.archive import ArchiveReader, Piece
    from kvstore.cli.inflow import Inflow
    from kvstore.cli.lane import Arrivals
    from kvstore.cli.outflow import Outflow

_DESCRIPTION = """\
Puts records into one tier of any backend: from an archive that kvstore export wrote, or straight from
another store. Every record is verified before it is stored, whoever made the archive; what fails is
left out and counted. A record that the store has is left as it is. Records keep their codec. Of an
archive that is cut off everything whole is taken, and the command ends with exit code 1; running it
again with the whole archive adds the rest."""

_MAGIC_AT: Final = 257  # of a tar: "ustar"
_MAGIC: Final = b"ustar"
_UNAVAILABLE: Final = ("timeout", "unavailable")
_FAILED: Final = ("full", "read_only", "denied", "too_large", *_UNAVAILABLE)


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="import",
            summary="put records from a file or another store into a store",
            description=_DESCRIPTION,
            examples=(
                ("kvstore import kvstore.toml --tier s3 --from kv.tar", "an archive into a bucket"),
                ("kvstore import /var/lib/new --backend lmdb --from kv.tar", "into a store that it makes"),
                ("kvstore import kvstore.toml --tier s3 --from kvstore.toml --from-tier lmdb", "from tier to tier"),
            ),
            run=_run,
        ),
    )
    add_store_arguments(parser)
    parser.add_argument(
        "--from", dest="source", required=True, metavar="SRC", help='archive ("-" is standard input), config or store'
    )
    parser.add_argument("--from-tier", metavar="NAME", help="tier of the config that SRC is")
    parser.add_argument("--from-backend", metavar="NAME", help="backend when SRC is a directory (lmdb)")
    add_filters(parser)


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.inflow import Inflow
    from kvstore.cli.keys import record_keys
    from kvstore.cli.store import Named, one_site

    site = one_site(Named.by(args, create=True), "--tier")
    inflow = Inflow(site, record_keys(site.config))
    started = time.monotonic()
    origin: dict[str, Any]
    if args.source == STREAM or _is_archive(Path(args.source)):
        origin = _from_archive(args, inflow)
    else:
        origin = _from_store(args, inflow)
    arrivals = inflow.arrivals
    report = {
        "tier": site.tier.name,
        "from": args.source,
        **_counts(arrivals),
        **origin,
        "seconds": round(time.monotonic() - started, 3),
    }
    if args.json:
        print_json(report)
    else:
        print("\n".join(_lines(report)))
    return _exit_code(report)


def _is_archive(path: Path) -> bool:
    """Whether a file is a tar; what is none is a config or the directory of a store.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        if path.is_dir():
            return False
        with path.open("rb") as file:
            start = file.read(_MAGIC_AT + len(_MAGIC))
    except OSError as e:
        msg = f"{path} cannot be read: {e.strerror}; --from expects an archive, a config, or a store's directory"
        raise ConfigError(msg) from e
    return start[_MAGIC_AT:] == _MAGIC or path.suffix in {".tar", ".gz", ".zst"}


def _from_archive(args: argparse.Namespace, inflow: Inflow) -> dict[str, Any]:
    from kvstore.cli.archive import ArchiveReader

    for option in ("from_tier", "from_backend", "newest", "max_bytes"):
        if getattr(args, option) is not None:
            msg = f"--{option.replace('_', '-')} is for stores, and {args.source} is an archive"
            raise ConfigError(msg)
    with _source(args.source) as file, progress("import", 0) as advance:
        archive = ArchiveReader(file)
        inflow.take_all(_of_namespace(archive, args.namespace), advance)
    return {"cut_off": archive.cut_off}


@contextmanager
def _source(name: str) -> Iterator[BinaryIO]:
    if name == STREAM:
        if sys.stdin.isatty():
            raise ConfigError("an archive is nothing to type; pipe it, or name a file with --from")
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as file:
        yield file


def _of_namespace(archive: ArchiveReader, name: str | None) -> Iterable[Piece]:
    """The pieces of the namespaces that fit: start of a digest, or the model of a description that came before."""
    from kvstore.cli.archive import Document, Parcel
    from kvstore.cli.namespaces import parse_document

    fitting: set[bytes] = set()
    for piece in archive:
        if isinstance(piece, Document) and name is not None:
            parsed = parse_document(piece.text)
            if parsed is not None and parsed[0].model == name:
                fitting.add(piece.namespace)
        namespace = (
            piece.namespace
            if isinstance(piece, Document)
            else piece.head.namespace
            if isinstance(piece, Parcel)
            else None
        )
        if name is None or namespace is None or namespace in fitting or namespace.hex().startswith(name.lower()):
            yield piece


def _from_store(args: argparse.Namespace, inflow: Inflow) -> dict[str, Any]:
    from kvstore.cli.keys import record_keys
    from kvstore.cli.outflow import Outflow
    from kvstore.cli.store import Named, one_site

    site = one_site(Named(args.source, None, args.from_tier, args.from_backend), "--from-tier")
    with site.opened() as store:
        outflow = Outflow(store, wanted(args), record_keys(site.config))
        with progress(f"list {store.tier.name}", store.backend.usage().records) as advance:
            outflow.look(advance)
        with progress("import", len(outflow.records)) as advance:
            inflow.take_all(outflow, advance)
    return _left(outflow)


def _left(outflow: Outflow) -> dict[str, Any]:
    return {name: outflow.counts[name] for name in ("cleared", "damaged", "vanished", "unread")}


def _counts(arrivals: Arrivals) -> dict[str, Any]:
    return {
        "stored": arrivals.counts["stored"],
        "existing": arrivals.counts["existing"],
        "left_out": arrivals.counts["left_out"],
        "failed": {name: arrivals.counts[name] for name in _FAILED if arrivals.counts[name]},
        "bytes": arrivals.nbytes,
        "described": arrivals.documents["kept"],
        "undescribed": arrivals.documents["unverified"],
        "refused": [{"name": refused.name, "reason": refused.reason} for refused in arrivals.refused],
    }


def _exit_code(report: dict[str, Any]) -> int:
    if report["refused"] or report.get("cut_off") or report.get("damaged"):
        return EXIT_FINDINGS
    if report.get("unread") or any(name in report["failed"] for name in _UNAVAILABLE):
        return EXIT_UNAVAILABLE
    return EXIT_FINDINGS if report["failed"] else EXIT_OK


def _lines(report: dict[str, Any]) -> Iterator[str]:
    stored, there = plural(report["stored"], "record"), report["existing"]
    also = f", {there:,} were there already" if there else ""
    yield f"tier {report['tier']!r}: stored {stored}{also} ({size(report['bytes'])} in {report['seconds']:.1f} s)"
    if report["left_out"]:
        yield f"  left out {plural(report['left_out'], 'record')}: the store is full of those that came first"
    for name, count in report["failed"].items():
        yield f"  {plural(count, 'record')} not stored: the medium says {name.replace('_', ' ')}"
    if report["undescribed"]:
        yield f"  left out {plural(report['undescribed'], 'description')} of namespaces that cannot be verified"
    yield from left_lines({"damaged": 0, "cleared": 0, "vanished": 0, "unread": 0} | report)
    if report.get("cut_off"):
        yield f"  the archive is not whole: {report['cut_off']}; what came before was taken"
