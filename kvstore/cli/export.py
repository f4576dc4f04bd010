"""``kvstore export``: records of a store into one file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from kvstore.cli.command import (
    Command,
    Subcommands,
    add_command,
    add_store_arguments,
    bytes_argument,
    count_argument,
    store_exit_code,
)
from kvstore.cli.output import plural, print_json, printable, progress, size
from kvstore.errors import ConfigError, KVStoreError

if TYPE_CHECKING:
    from kvstore.cli.outflow import Outflow, Wanted

STREAM: Final = "-"
"""Names standard input or output instead of a file."""

_SHOWN: Final = 20  # refused records listed one by one for people; --json has all

_DESCRIPTION = """\
Writes the records of one tier into an archive: a plain tar with one member for each record, as it is
stored, and the description of each namespace. Every record is verified first; what fails is left out
and counted. The store is opened read-only, also while other processes use it. kvstore import puts the
records into a store of any backend. Compressing an archive gains little: records are encoded already."""


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="export",
            summary="write the records of a store into one file",
            description=_DESCRIPTION,
            examples=(
                ("kvstore export /var/lib/kvstore --to kv.tar", "everything in an LMDB store"),
                ("kvstore export kvstore.toml --tier s3 --namespace 1d06 --to kv.tar", "one namespace of a bucket"),
                (
                    "kvstore export kvstore.toml --to - | ssh host kvstore import kvstore.toml --from -",
                    "to another host",
                ),
            ),
            run=_run,
        ),
    )
    add_store_arguments(parser)
    parser.add_argument("--to", required=True, metavar="FILE", help='archive to write; "-" is standard output')
    add_filters(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose records."""
    parser.add_argument("--namespace", metavar="NAME", help="only this one: start of its digest, or its model")
    parser.add_argument("--newest", type=count_argument, metavar="N", help="only the N records used last")
    parser.add_argument("--max-bytes", type=bytes_argument, metavar="SIZE", help="only records used last: 10GiB")


def wanted(args: argparse.Namespace) -> Wanted:
    """What those options say."""
    from kvstore.cli.outflow import Wanted

    return Wanted(args.namespace, args.newest, args.max_bytes)


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.keys import record_keys
    from kvstore.cli.outflow import Outflow
    from kvstore.cli.store import Named, one_site

    if args.to == STREAM and sys.stdout.isatty():
        raise ConfigError("an archive is nothing for a terminal; pipe it, or name a file with --to")
    site = one_site(Named.by(args), "--tier")
    with site.opened() as store:
        outflow = Outflow(store, wanted(args), record_keys(site.config))
        with progress(f"list {store.tier.name}", store.backend.usage().records) as advance:
            outflow.look(advance)
        if not outflow.records:
            msg = f"tier {store.tier.name!r} holds no records to export"
            raise ConfigError(msg)
        with _target(args.to, force=args.force) as out:
            report = _write(outflow, out)
    report = {"tier": site.tier.name, "to": args.to} | report
    if args.json:
        print_json(report, to_errors=args.to == STREAM)
    else:
        print("\n".join(_lines(report)), file=sys.stderr if args.to == STREAM else sys.stdout)
    return store_exit_code(corrupt=bool(report["refused"] or report["damaged"]), unread=report["unread"] > 0)


def _write(outflow: Outflow, out: BinaryIO) -> dict[str, Any]:
    from kvstore.cli.archive import ArchiveWriter, Document, Refused

    started = time.monotonic()
    refused = []
    documents = 0
    archive = ArchiveWriter(out)
    with progress(f"export {outflow.store.tier.name}", len(outflow.records)) as advance:
        for piece in outflow:
            if isinstance(piece, Document):
                archive.document(piece.namespace, piece.text)
                documents += 1
            elif isinstance(piece, Refused):
                refused.append({"name": piece.name, "reason": piece.reason})
                advance(1)
            else:
                archive.record(piece)
                advance(1, len(piece.data))
        archive.finish()
        out.flush()
    counts = {name: outflow.counts[name] for name in ("cleared", "damaged", "vanished", "unread")}
    return {
        "records": archive.records,
        "namespaces": len({record.namespace for record in outflow.records}),
        "described": documents,
        "bytes": archive.nbytes,
        "refused": refused,
        **counts,
        "seconds": round(time.monotonic() - started, 3),
    }


@contextmanager
def _target(name: str, *, force: bool) -> Iterator[BinaryIO]:
    """A file that appears when it is whole, or standard output.

    Raises:
        ConfigError: It is not to be written.
        KVStoreError: Writing failed; nothing is left of it.
    """
    path = Path(name)
    if name == STREAM:
        try:
            yield sys.stdout.buffer
        except BrokenPipeError as e:
            # Python would complain again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise KVStoreError("whoever read the archive has gone; it is not whole") from e
        return
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or a named pipe
        with path.open("wb") as out:
            yield out
        return
    if path.exists() and not force:
        msg = f"{path} exists and was left alone; say --force to replace it, or name another file"
        raise ConfigError(msg)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # O_EXCL follows no link; nobody else reads what a tenant stored
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        msg = f"{path} cannot be written: {e.strerror}; name a file in a directory that exists and is yours"
        raise ConfigError(msg) from e
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        partial.replace(path)
    except OSError as e:
        msg = f"{path} was not written: {e.strerror or e}"
        raise KVStoreError(msg) from e
    finally:
        partial.unlink(missing_ok=True)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    records, spaces = plural(report["records"], "record"), plural(report["namespaces"], "namespace")
    what = "standard output" if report["to"] == STREAM else report["to"]
    taken = f"{size(report['bytes'])} in {report['seconds']:.1f} s"
    yield f"tier {report['tier']!r}: wrote {records} of {spaces} to {what} ({taken})"
    yield from left_lines(report)


def left_lines(report: dict[str, Any]) -> Iterator[str]:
    """What of a store did not come along, and why."""
    for refused in report["refused"][:_SHOWN]:
        yield f"  left out {printable(refused['name'])}: {refused['reason']}"
    if len(report["refused"]) > _SHOWN:
        yield f"  and {len(report['refused']) - _SHOWN:,} more; --json lists all"
    if report["damaged"]:
        yield f"  left out {plural(report['damaged'], 'record')} with a damaged head; kvstore verify tells more"
    if report["cleared"]:
        yield f"  left out {plural(report['cleared'], 'record')} that were cleared"
    if report["vanished"]:
        yield f"  {plural(report['vanished'], 'record')} left the store meanwhile"
    if report["unread"]:
        yield f"  {plural(report['unread'], 'record')} could not be read: the medium did not answer"
