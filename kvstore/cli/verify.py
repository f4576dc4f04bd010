"""``kvstore verify``: read every record of a store, check all its checksums, and repair."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.command import (
    Command,
    Subcommands,
    add_command,
    add_store_arguments,
    count_argument,
    store_exit_code,
)
from kvstore.cli.output import plural, print_json, progress, size
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.cli.donors import Donors
    from kvstore.cli.quarantine import Quarantine
    from kvstore.cli.repair import Outcome
    from kvstore.cli.scrub import Extent, Scrub, Suspect
    from kvstore.cli.store import Site, Store
    from kvstore.keyring import Keyring

_DESCRIPTION = """\
Reads every record of a store and checks it: structure, every checksum, that it is stored under the
name it was made for and, when the config names record keys, that it was made with one of them.
Changes nothing, so that it may run beside the processes that use the store, unless told to:
--repair replaces a damaged record by a verified copy from another tier of the config, --quarantine
moves damaged records into a directory, --drop-corrupt drops them. A record that is dropped costs
its block and nothing else; on media that pack, the blocks behind it in its pack go with it. Ends
with exit code 1 when there were damaged records, whatever was done about them."""

_SHOWN: Final = 20  # records listed one by one for people; --json has all
_MOST_PERCENT: Final = 100.0


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="verify",
            summary="check every record of a store, and repair",
            description=_DESCRIPTION,
            examples=(
                ("kvstore verify ~/.cache/llm-kvstore/demo-store/lmdb", "scrub what the demo stored"),
                ("kvstore verify --config kvstore.toml --tier s3 --sample 1%", "a hundredth of one tier, by lot"),
                ("kvstore verify kvstore.toml --repair --drop-corrupt", "good copies from other tiers, or out"),
                ("kvstore verify kvstore.toml --quarantine /var/tmp/bad", "move what is damaged there"),
            ),
            run=_run,
        ),
    )
    add_store_arguments(parser)
    parser.add_argument("--repair", action="store_true", help="take good copies from the config's other tiers")
    parser.add_argument("--quarantine", metavar="DIR", help="move damaged records into this directory")
    parser.add_argument("--drop-corrupt", action="store_true", help="drop damaged records")
    parser.add_argument("--drop-unauthenticated", action="store_true", help="drop those made without the record keys")
    parser.add_argument("--sample", type=_percent, default=1.0, metavar="N%", help="only N %% of the records, by lot")
    parser.add_argument("--limit", type=count_argument, metavar="N", help="stop after N records of each tier")


def _percent(text: str) -> float:
    with contextlib.suppress(ValueError):
        percent = float(text.removesuffix("%"))
        if 0 < percent <= _MOST_PERCENT:
            return percent / _MOST_PERCENT
    raise argparse.ArgumentTypeError(f"{text!r} is no percentage above 0; write it as in 5%")


@dataclass(slots=True)
class _Job:
    """What to do with each tier."""

    extent: Extent
    keys: Keyring | None
    quarantine: Quarantine | None
    donors: Donors | None
    drop: bool
    drop_unauthenticated: bool
    kept: set[bytes] = field(default_factory=set)
    trouble: str = ""

    @property
    def changes(self) -> bool:
        """Whether the store is opened for writing."""
        return bool(self.drop or self.drop_unauthenticated or self.quarantine or self.donors)

    def keep(self, store: Store, suspect: Suspect, record: memoryview) -> None:
        """Copy a damaged record into the quarantine, if there is one; never raises for what the disk does."""
        if self.quarantine is None or suspect.unauthenticated:
            return
        facts = {"tier": store.tier.name, "backend": store.tier.backend, **suspect.as_dict()}
        if suspect.namespace is not None:
            facts["namespace"] = suspect.namespace.hex()
        try:
            self.quarantine.keep(suspect.name, record, facts)
            self.kept.add(suspect.name)
        except OSError as e:
            self.trouble = f"{self.quarantine.path}: {e.strerror}"

    def doomed(self, scrub: Scrub) -> set[bytes]:
        """What is taken out even without a good copy."""
        corrupt = {s.name for s in scrub.corrupt()} if self.drop and self.quarantine is None else self.kept
        return corrupt | ({s.name for s in scrub.unauthenticated()} if self.drop_unauthenticated else set())


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.keys import record_keys
    from kvstore.cli.quarantine import Quarantine
    from kvstore.cli.scrub import Extent
    from kvstore.cli.store import Named, sites

    extent = Extent(args.sample, args.limit)
    reports = []
    with ExitStack() as opened:
        quarantine = None
        found = sites(Named.by(args))
        keys = record_keys(found[0].config)
        if args.quarantine is not None:
            quarantine = Quarantine(Path(args.quarantine).expanduser())
            opened.callback(quarantine.close)
        for site in found:
            donors = _donors(args, site, keys) if args.repair else None
            job = _Job(extent, keys, quarantine, donors, args.drop_corrupt, args.drop_unauthenticated)
            reports.append(_verify(site, job))
    if args.json:
        print_json(reports)
    else:
        print("\n".join(line for report in reports for line in _lines(report)))
    bad = any(report["corrupt"] or report["unauthenticated"] for report in reports)
    return store_exit_code(corrupt=bad, unread=any(report["unread"] for report in reports))


def _donors(args: argparse.Namespace, site: Site, keys: Keyring | None) -> Donors:
    """The other tiers of the config, also those that are not verified themselves.

    Raises:
        ConfigError: There are none.
    """
    from kvstore.cli.donors import Donors
    from kvstore.cli.store import Named, sites

    every = sites(Named(args.store, args.config, None, args.backend))
    if len(every) == 1:
        msg = f"tier {site.tier.name!r} is the only one at rest; --repair takes good copies from another one"
        raise ConfigError(msg)
    return Donors(every, site, keys)


def _verify(site: Site, job: _Job) -> dict[str, Any]:
    from kvstore.cli.repair import Outcome, Repairer
    from kvstore.cli.scrub import Scrub

    started = time.monotonic()
    outcome = Outcome()
    with site.opened(read_only=not job.changes) as store, ExitStack() as opened:
        if job.donors is not None:
            opened.callback(job.donors.close)
        scrub = Scrub(store, job.keys, lambda suspect, view: job.keep(store, suspect, view))
        expected = job.extent.expected(store.backend.usage().records)
        with progress(f"verify {store.tier.name}", expected) as advance:
            statuses = scrub.run(job.extent, advance)
        if job.changes and scrub.suspects:
            outcome = Repairer(site, scrub, job.donors, job.doomed(scrub)).run(scrub.suspects)
    return _report(scrub, job, outcome, statuses) | {"seconds": round(time.monotonic() - started, 3)}


def _report(scrub: Scrub, job: _Job, outcome: Outcome, statuses: Counter[Any]) -> dict[str, Any]:
    from kvstore.cli.store import unread
    from kvstore.types import ReadStatus

    return {
        "tier": scrub.store.tier.name,
        "records": scrub.sound + len(scrub.suspects),
        "sound": scrub.sound,
        "corrupt": [suspect.as_dict() for suspect in scrub.corrupt()],
        "unauthenticated": [suspect.as_dict() for suspect in scrub.unauthenticated()],
        "repaired": dict(outcome.repaired),
        "not_repaired": outcome.failed,
        "quarantined": len(job.kept),
        "quarantine_failed": job.trouble,
        "dropped": outcome.dropped,
        "lost": outcome.lost,
        "left": outcome.left if job.changes else len(scrub.suspects),
        "read_only": not job.changes,
        "vanished": statuses[ReadStatus.ABSENT],
        "unread": unread(statuses),
        "bytes": scrub.nbytes,
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    corrupt, strange = report["corrupt"], report["unauthenticated"]
    verdict = f"{len(corrupt):,} corrupt" if corrupt else "all sound"
    if strange:
        verdict = f"{verdict if corrupt else '0 corrupt'}, {len(strange):,} unauthenticated"
    rate = f"{report['bytes'] / 1e6 / max(report['seconds'], 1e-3):,.0f} MB/s"
    read = f"{size(report['bytes'])} in {report['seconds']:.1f} s, {rate}"
    yield f"tier {report['tier']!r}: {plural(report['records'], 'record')} checked, {verdict} ({read})"
    bad = corrupt + strange
    for reason, count in Counter(record["reason"] for record in bad).items():
        yield f"  {plural(count, 'record')}: {reason}"
    for record in bad[:_SHOWN]:
        yield f"  {record['name'][34:50]}  {record['detail']}"
    if len(bad) > _SHOWN:
        yield f"  and {len(bad) - _SHOWN:,} more; --json lists all"
    yield from _deeds(report)
    if report["vanished"]:
        yield f"  {plural(report['vanished'], 'record')} left the store during the check"
    if report["unread"]:
        yield f"  {plural(report['unread'], 'record')} could not be read: the medium did not answer"


def _deeds(report: dict[str, Any]) -> Iterator[str]:
    """What was done about it."""
    for tier, count in report["repaired"].items():
        yield f"  repaired {plural(count, 'record')} from tier {tier!r}"
    if report["not_repaired"]:
        yield f"  took out {plural(report['not_repaired'], 'record')} whose good copies could not be stored"
    if report["quarantined"]:
        yield f"  kept {plural(report['quarantined'], 'damaged record')} in the quarantine"
    if report["quarantine_failed"]:
        yield f"  the quarantine cannot be written, {report['quarantine_failed']}; what is not kept was not dropped"
    if report["dropped"]:
        yield f"  dropped {plural(report['dropped'], 'record')}"
    if report["lost"]:
        yield f"  {plural(report['lost'], 'sound record')} behind those in their packs went with them"
    if report["left"]:
        yield f"  left {plural(report['left'], 'record')} in place; readers treat {_them(report['left'])} as misses"
        if report["read_only"]:
            yield "  nothing was changed: --repair takes good copies from other tiers, --drop-corrupt drops"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"
