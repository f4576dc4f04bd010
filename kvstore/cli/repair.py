"""Damaged records out of a store, and good copies of other tiers into their place."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.backend import Capability
from kvstore.cli.archive import Parcel
from kvstore.cli.lane import Arrivals, Lane
from kvstore.cli.namespaces import read_documents
from kvstore.cli.records import LivePrefixes, check
from kvstore.cli.scrub import around
from kvstore.cli.store import Subject
from kvstore.errors import CorruptRecordError
from kvstore.types import Call, Presence, PutStatus

if TYPE_CHECKING:
    from kvstore.backend import Backend
    from kvstore.cli.donors import Donors
    from kvstore.cli.scrub import Scrub, Suspect
    from kvstore.cli.store import Site

_BATCH_RECORDS: Final = 16  # damaged records in hand at once
_WINDOW_RECORDS: Final = 64
_BATCH_PACKED: Final = 4  # each with its neighbours, two packs' worth of them: 256 MiB together at most
_BATCH_S: Final = 60.0
_NAMESPACE_BYTES: Final = 16
_STORED: Final = (PutStatus.STORED, PutStatus.EXISTS)


@dataclass(slots=True)
class Outcome:
    """What became of the damaged records of a tier.

    Attributes:
        repaired: By the tier that the good copy came from.
        dropped: Taken out without one.
        left: Left where they are: no copy, and dropping was not asked for.
        failed: Taken out, and the good copy could not be stored; the next reader's tier helps.
        lost: Sound neighbours in a pack that went with them.
    """

    repaired: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    left: int = 0
    failed: int = 0
    lost: int = 0


class Repairer:
    """Takes damaged records out of one store, and puts good copies in where there are some.

    On media that pack, a record goes with all of its pack; sound neighbours are put back then, unless
    they stand behind a block that is gone for good, where no prompt reaches them.

    Args:
        site: The tier.
        scrub: What was found there; its store is open for writing.
        donors: Where good copies may be; None to look for none.
        drop: Names that are taken out even without a copy.
    """

    def __init__(self, site: Site, scrub: Scrub, donors: Donors | None, drop: Collection[bytes]) -> None:
        self._site = site
        self._scrub = scrub
        self._backend = scrub.store.backend
        self._donors = donors
        self._drop = drop
        self._packs = Capability.PACKS in self._backend.capabilities
        self._align = self._backend.batch_shape().align
        self._prefixes = LivePrefixes(self._backend)
        self._outcome = Outcome()

    def run(self, suspects: Sequence[Suspect]) -> Outcome:
        """Treat the records; what the medium refuses is counted.

        Raises:
            BackendError: The medium failed.
        """
        for namespace in self._namespaces():
            self._prefixes.of(namespace)
        if self._packs:
            self._run_packed({suspect.name: suspect for suspect in suspects})
        else:
            for start in range(0, len(suspects), _BATCH_RECORDS):
                self._treat(suspects[start : start + _BATCH_RECORDS], ())
        return self._outcome

    def _run_packed(self, suspects: dict[bytes, Suspect]) -> None:
        """List once more, and treat records when they come up: then the backend knows in which packs they are."""
        reach = max(1, self._backend.batch_shape().blocks)
        for names, window in _windows(self._backend, max(reach, _WINDOW_RECORDS)):
            here = [suspects[name] for name in names if name in suspects]
            for start in range(0, len(here), _BATCH_PACKED):
                batch = here[start : start + _BATCH_PACKED]
                self._treat(batch, around(window, {suspect.name for suspect in batch}, reach))

    def _namespaces(self) -> set[bytes]:
        """Whose names may be damaged: those that sound records, heads and descriptions tell of."""
        found = self._scrub.namespaces | {s.namespace for s in self._scrub.suspects if s.namespace is not None}
        stores = [self._scrub.store, *(self._donors.stores() if self._donors is not None else ())]
        for store in stores:
            for digest in read_documents(store):
                try:
                    found.add(bytes.fromhex(digest))
                except ValueError:
                    continue
        return {namespace for namespace in found if len(namespace) == _NAMESPACE_BYTES}

    def _treat(self, suspects: Sequence[Suspect], near: Sequence[bytes]) -> None:
        copies = self._copies(suspects)
        doomed = [s for s in suspects if s.name in copies or s.name in self._drop]
        self._outcome.left += len(suspects) - len(doomed)
        good = {name: parcel for name, (_, parcel) in copies.items()}
        neighbours = self._neighbours(near, good) if near and doomed else {}
        for suspect in doomed:
            self._backend.discard(suspect.name, suspect.header_checksum)
        gone = {s.name for s in doomed if s.name not in copies}
        lost = self._lost(neighbours)
        stored = self._put(_with_beginnings(good | _reachable(lost, gone), neighbours, self._align))
        for name, (tier, _) in copies.items():
            if name in stored:
                self._outcome.repaired[tier] += 1
            else:
                self._outcome.failed += 1
        self._outcome.dropped += len(gone)
        self._outcome.lost += sum(name not in stored for name in lost)

    def _copies(self, suspects: Iterable[Suspect]) -> dict[bytes, tuple[str, Parcel]]:
        """Good copies by the names of the damaged records."""
        if self._donors is None:
            return {}
        spaces = {s.name: self._prefixes.namespace_of(s.name) for s in suspects}
        wanted = {name[16:]: namespace for name, namespace in spaces.items() if namespace is not None}
        found = self._donors.copies(wanted) if wanted else {}
        return {name: found[name[16:]] for name, ns in spaces.items() if ns is not None and name[16:] in found}

    def _neighbours(self, near: Sequence[bytes], good: dict[bytes, Parcel]) -> dict[bytes, Parcel]:
        """The sound ones among records that may lie in one pack with damaged ones, if caches can reach them.

        With them come those that lead to them from the beginning of their packs, wherever these lie.
        """
        found: dict[bytes, Parcel] = {}
        wanted: Sequence[bytes] = near
        while wanted:
            self._read(wanted, found)
            parents = (_parent(name, parcel, self._align) for name, parcel in (good | found).items())
            tried = {*near, *wanted, *found, *good}
            wanted = [name for name in dict.fromkeys(parents) if name and name not in tried]
        return found

    def _read(self, names: Sequence[bytes], found: dict[bytes, Parcel]) -> None:
        def receive(i: int, view: memoryview) -> None:
            with contextlib.suppress(CorruptRecordError):
                head = check(view, names[i][17:])
                if self._prefixes.of(head.namespace) == names[i][:16]:
                    found[names[i]] = Parcel(names[i][16], head, bytes(view))

        self._backend.get_many(names, receive, Call.within(_BATCH_S))

    def _lost(self, neighbours: dict[bytes, Parcel]) -> dict[bytes, Parcel]:
        """Those of the neighbours that went with a damaged record."""
        if not neighbours:
            return {}
        found = self._backend.exists_many(list(neighbours), Call.within(_BATCH_S))
        present = zip(neighbours.items(), found, strict=True)
        return {name: parcel for (name, parcel), presence in present if presence is not Presence.PRESENT}

    def _put(self, parcels: dict[bytes, Parcel]) -> set[bytes]:
        """Store records as a cache of their namespace would; returns the names that are there now."""
        spaces: dict[bytes, list[Parcel]] = {}
        for parcel in sorted(parcels.values(), key=lambda parcel: parcel.head.block_index):
            spaces.setdefault(parcel.head.namespace, []).append(parcel)
        statuses: dict[bytes, PutStatus] = {}
        for namespace, group in spaces.items():
            subject = Subject(namespace, None, group[0].head.raw_bytes)
            with self._site.opened(read_only=False, subject=subject) as store:
                lane = Lane(store, namespace, Arrivals(statuses=statuses))
                for parcel in _in_sequences(group):
                    lane.add(parcel)
                lane.finish()
        return {name for name, status in statuses.items() if status in _STORED}


def _windows(backend: Backend, size: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Cut a listing into pieces, each also with the pieces around it."""
    before: list[bytes] = []
    here: list[bytes] = []
    after: list[bytes] = []
    for info in backend.scan():
        after.append(info.name)
        if len(after) == size:
            yield here, before + here + after
            before, here, after = here, after, []
    yield here, before + here + after
    yield after, here + after


def _in_sequences(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Order parcels, sorted by position, so that runs stay together and parents come first."""
    runs: list[list[Parcel]] = []
    ends: dict[bytes, list[Parcel]] = {}
    for parcel in parcels:
        run = ends.pop(parcel.head.parent, None) if parcel.head.parent_known else None
        if run is None:
            run = []
            runs.append(run)
        run.append(parcel)
        ends[parcel.head.digest] = run
    return [parcel for run in runs for parcel in run]


def _parent(name: bytes, parcel: Parcel, align: int) -> bytes:
    """Name of the block before one, where that belongs into the same pack; empty otherwise."""
    head = parcel.head
    return name[:17] + head.parent if head.parent_known and head.block_index % align else b""


def _with_beginnings(parcels: dict[bytes, Parcel], others: dict[bytes, Parcel], align: int) -> dict[bytes, Parcel]:
    """Add what leads to records from the beginning of their packs: a sequence is found by packs of its own."""
    complete = dict(parcels)
    waiting = list(parcels)
    while waiting:
        name = waiting.pop()
        parent = _parent(name, complete[name], align)
        if parent in others and parent not in complete:
            complete[parent] = others[parent]
            waiting.append(parent)
    return complete


def _reachable(lost: dict[bytes, Parcel], gone: Collection[bytes]) -> dict[bytes, Parcel]:
    """Those records whose sequence does not lead through a name that is gone for good."""
    behind = set(gone)
    reachable = {}
    for name, parcel in sorted(lost.items(), key=lambda pair: pair[1].head.block_index):
        if parcel.head.parent_known and name[:17] + parcel.head.parent in behind:
            behind.add(name)
        else:
            reachable[name] = parcel
    return reachable
