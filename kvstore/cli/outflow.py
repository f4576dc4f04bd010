"""Records out of a store: which ones, in which order, each one verified."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.backend import Capability
from kvstore.cli.archive import Document, Parcel, Piece, Refused
from kvstore.cli.namespaces import find_namespace, read_documents
from kvstore.cli.records import Known, chains, check, in_sequences, survey
from kvstore.errors import CorruptRecordError
from kvstore.types import Call, ReadStatus, Run

if TYPE_CHECKING:
    from kvstore.cli.store import Store
    from kvstore.keyring import Keyring

_BATCH_RECORDS: Final = 32
_BATCH_BYTES: Final = 64 << 20  # held in memory between the medium and whoever takes them
_BATCH_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records to take.

    Attributes:
        namespace: Start of a digest in hex, or a model's name; None for all.
        newest: At most that many records, those used last; None for all.
        max_bytes: Records used last, until they take so much; None for all.
    """

    namespace: str | None = None
    newest: int | None = None
    max_bytes: int | None = None

    def choose(self, records: Sequence[Known]) -> list[Known]:
        """The records within the limits; of those used together, the heads of their sequences first."""
        ranked = sorted(records, key=lambda r: (-r.used, r.position, r.name))[: self.newest]
        if self.max_bytes is None:
            return ranked
        left, taken = self.max_bytes, 0
        for record in ranked:
            left -= record.nbytes
            if left < 0:
                break
            taken += 1
        return ranked[:taken]


@dataclass(slots=True)
class Outflow:
    """Iterates over what a store gives: each namespace's description, then its records, parents first.

    Args:
        store: Opened, with the capability ``SCAN``.
        wanted: Which records.
        keys: With which records must be authenticated; None to leave tags alone.

    Attributes:
        records: What will come, in order; damaged records included.
        counts: ``cleared``, ``vanished`` and ``unread`` records that do not come.
    """

    store: Store
    wanted: Wanted = field(default_factory=Wanted)
    keys: Keyring | None = None
    records: list[Known] = field(default_factory=list)
    documents: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def look(self, advance: Callable[[int], None]) -> None:
        """List the store and choose; before anything is read.

        Raises:
            ConfigError: It holds no such namespace, or several.
            BackendError: The medium failed.
        """
        found = survey(self.store, advance)
        documents = read_documents(self.store, found.namespaces)
        chosen = found.records
        if self.wanted.namespace is not None:
            digest = find_namespace(self.wanted.namespace, found.namespaces, documents, self.store.tier.name)
            chosen = [record for record in chosen if record.namespace == digest]
        self.records = in_sequences(self.wanted.choose(chosen))
        self.documents = {name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}
        self.counts.update(cleared=found.cleared, damaged=found.damaged, unread=found.unread)

    @property
    def nbytes(self) -> int:
        """Bytes of the records that will come."""
        return sum(record.nbytes for record in self.records)

    def __iter__(self) -> Iterator[Piece]:
        told: set[bytes] = set()
        for chain in chains(self.records):
            namespace = chain[0].namespace
            if namespace not in told:
                told.add(namespace)
                if namespace.hex() in self.documents:
                    yield Document(namespace, self.documents[namespace.hex()])
            for batch in _batches(chain):
                yield from self._read(batch, chain)

    def _read(self, batch: Sequence[Known], chain: Sequence[Known]) -> Iterator[Piece]:
        names = [record.name for record in batch]
        pieces: dict[int, Piece] = {}
        lock = threading.Lock()

        def receive(i: int, view: memoryview) -> None:
            piece = self._piece(batch[i], view)
            with lock:
                pieces[i] = piece

        call = Call.within(_BATCH_S)
        if Capability.PACKS in self.store.backend.capabilities and chain[0].position >= 0:
            call.run = Run(chain[0].position, [record.name for record in chain])
        statuses = self.store.backend.get_many(names, receive, call)
        for i, status in enumerate(statuses):
            if status is ReadStatus.OK and i in pieces:
                yield pieces[i]
            else:
                self.counts["vanished" if status is ReadStatus.ABSENT else "unread"] += 1

    def _piece(self, record: Known, view: memoryview) -> Piece:
        try:
            head = check(view, record.name[17:], self.keys)
        except CorruptRecordError as e:
            return Refused(record.name.hex(), str(e))
        if head.namespace != record.namespace:
            return Refused(record.name.hex(), "was replaced by another one meanwhile")
        return Parcel(record.name[16], head, bytes(view))


def _batches(chain: Sequence[Known]) -> Iterator[Sequence[Known]]:
    start = nbytes = 0
    for i, record in enumerate(chain):
        if i > start and (i - start >= _BATCH_RECORDS or nbytes + record.nbytes > _BATCH_BYTES):
            yield chain[start:i]
            start, nbytes = i, 0
        nbytes += record.nbytes
    yield chain[start:]
