"""Whole records outside a cache: checked against their name, listed by what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.errors import BackendError, CorruptRecordError
from kvstore.l2.names import name_prefix
from kvstore.record import HEADER_BYTES, Head, unpack_head, verify_record
from kvstore.types import Call

if TYPE_CHECKING:
    from kvstore.backend import Backend, RecordInfo
    from kvstore.cli.store import Store
    from kvstore.keyring import Keyring

NAME_BYTES: Final = 49
"""A stored name: 16 bytes for namespace and epoch, the kind of key, the block's digest."""

_BATCH_S: Final = 60.0
_ZEROS: Final = bytes(32)


def check(view: memoryview, digest: bytes, keys: Keyring | None = None) -> Head:
    """Check a whole record as far as that goes without its spec: structure, checksums, block, tags.

    Args:
        view: The record.
        digest: The block that its name promises.
        keys: As in :func:`kvstore.record.verify_record`.

    Raises:
        CorruptRecordError: It fails.
    """
    head = verify_record(view, keys)
    if head.digest != digest:
        raise CorruptRecordError("key", f"holds the block {head.digest.hex()}")
    return head


class LivePrefixes:
    """What the names of a store begin with that caches look up; asks for each namespace's epoch once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._prefixes: dict[bytes, bytes | None] = {}

    def of(self, namespace: bytes) -> bytes | None:
        """First 16 bytes of live names; None when the store does not say."""
        if namespace not in self._prefixes:
            try:
                self._prefixes[namespace] = name_prefix(namespace, self._backend.epoch(namespace))
            except BackendError:  # opened read-only, and no epoch was ever kept
                self._prefixes[namespace] = None
        return self._prefixes[namespace]

    def cleared(self, namespace: bytes, name: bytes) -> bool:
        """Whether a record is one that ``clear`` has made unreachable."""
        live = self.of(namespace)
        return live is not None and not name.startswith(live)

    def namespace_of(self, name: bytes) -> bytes | None:
        """The namespace that a live name belongs to, among those that were asked about."""
        return next((ns for ns, live in self._prefixes.items() if live is not None and name.startswith(live)), None)


@dataclass(frozen=True, slots=True)
class Known:
    """A stored record, by its head.

    Attributes:
        name: Where it is stored.
        namespace: Whose bytes it holds.
        parent: Digest of the block before it; None for a first block, or when that is not known.
        position: Index of the block in its sequence; -1 when that is not known.
        nbytes: Length of the record.
        used: Unix time of its last use, or of its writing where the medium knows no use.
    """

    name: bytes
    namespace: bytes
    parent: bytes | None
    position: int
    nbytes: int
    used: float

    @classmethod
    def of(cls, info: RecordInfo, head: Head) -> Known:
        """Join what the medium and the head say; the head need not be sound."""
        parent = head.parent if head.parent_known and head.parent != _ZEROS else None
        position = head.block_index if head.parent_known else -1
        return cls(info.name, head.namespace, parent, position, info.nbytes, info.last_use or float(head.created))


@dataclass(slots=True)
class Survey:
    """What a store holds, by the heads of its records.

    Attributes:
        records: Those that caches can reach.
        cleared: How many they cannot, since the namespace was cleared.
        damaged: How many have no readable head.
        unread: How many could not be read.
    """

    records: list[Known] = field(default_factory=list)
    cleared: int = 0
    damaged: int = 0
    unread: int = 0

    @property
    def namespaces(self) -> list[bytes]:
        """Each namespace once, in order of its digest."""
        return sorted({record.namespace for record in self.records})


def survey(store: Store, advance: Callable[[int], None]) -> Survey:
    """Read the heads of all records of a store; their blocks are not looked at.

    Raises:
        NotSupportedError: The backend cannot list its records.
        BackendError: The medium failed.
    """
    from kvstore.cli.store import batches, unread

    found = Survey()
    prefixes = LivePrefixes(store.backend)
    heads: list[Known] = []
    for infos in batches(store.backend.scan()):
        received: dict[int, Head] = {}

        def receive(i: int, view: memoryview, received: dict[int, Head] = received) -> None:
            if len(view) >= HEADER_BYTES:
                received[i] = unpack_head(view)

        names = [info.name for info in infos]
        ranges = [(0, HEADER_BYTES)] * len(names)
        statuses = store.backend.get_ranges(names, ranges, receive, Call.within(_BATCH_S))
        found.unread += unread(Counter(statuses))
        heads += [Known.of(infos[i], head) for i, head in sorted(received.items())]
        advance(len(infos))
    for record in heads:
        prefixes.of(record.namespace)
    for record in heads:
        _sort_in(found, record, prefixes)
    return found


def _sort_in(found: Survey, record: Known, prefixes: LivePrefixes) -> None:
    if not prefixes.cleared(record.namespace, record.name):
        found.records.append(record)
    elif len(record.name) != NAME_BYTES or prefixes.namespace_of(record.name) is not None:
        found.damaged += 1  # it lies among the records of a namespace, and its head names another one
    else:
        found.cleared += 1


def in_sequences(records: Sequence[Known]) -> list[Known]:
    """Order records so that each stands behind its parent, one branch after the other.

    Sequences used last come first, so that what a reader gets of a cut-off list is whole and the
    most useful part; the same records are always listed in the same order.
    """
    ranked = sorted(records, key=lambda r: (r.namespace, r.name[16:17], -r.used, r.position, r.name))
    stored = {record.name for record in ranked}
    children: dict[bytes, list[Known]] = {}
    roots = []
    for record in ranked:
        parent = None if record.parent is None else record.name[:17] + record.parent
        if parent in stored:
            children.setdefault(parent, []).append(record)
        else:
            roots.append(record)
    ordered: dict[bytes, Known] = {}
    for record in (*roots, *ranked):  # the second time for rings of parents, which only damage makes
        _append_branch(record, children, ordered)
    return list(ordered.values())


def _append_branch(first: Known, children: dict[bytes, list[Known]], ordered: dict[bytes, Known]) -> None:
    waiting = [first]
    while waiting:
        record = waiting.pop()
        if record.name not in ordered:
            ordered[record.name] = record
            waiting += reversed(children.get(record.name, ()))


def chains(records: Iterable[Known]) -> Iterator[list[Known]]:
    """Cut an ordered list into runs of consecutive blocks of one sequence."""
    chain: list[Known] = []
    for record in records:
        if chain and not follows(chain[-1], record):
            yield chain
            chain = []
        chain.append(record)
    if chain:
        yield chain


def follows(record: Known, later: Known) -> bool:
    """Whether ``later`` is the next block of the sequence that ``record`` belongs to."""
    same = later.name[:17] == record.name[:17] and later.parent == record.name[17:]
    return same and later.position == record.position + 1 > 0


def orphans(records: Mapping[bytes, Known]) -> Iterator[Known]:
    """Records that no prompt reaches: one of the blocks before them is not among these.

    Args:
        records: By their names.
    """
    reached: dict[bytes, bool] = {}
    for name in records:
        path = []
        at = name
        while at in records and at not in reached:
            reached[at] = False  # what comes back here is a ring, which begins nowhere
            path.append(at)
            record = records[at]
            if record.parent is None:
                break
            at = record.name[:17] + record.parent
        whole = reached.get(at, False) or (at in records and records[at].parent is None)
        reached.update(dict.fromkeys(path, whole))
        if not reached[name]:
            yield records[name]
