"""A backend over any medium that keeps whole objects."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final

from kvstore.backend import (
    Backend,
    BackendContext,
    BatchShape,
    Capability,
    Place,
    PutItem,
    Receive,
    RecordInfo,
    Usage,
)
from kvstore.errors import BackendPermissionError, ClosedError, ConfigError
from kvstore.objects.drops import Drops
from kvstore.objects.epochs import Epochs
from kvstore.objects.finder import Finder
from kvstore.objects.listing import collect, scan
from kvstore.objects.medium import ObjectMedium
from kvstore.objects.reader import read_many
from kvstore.objects.remover import Remover
from kvstore.objects.settings import MAX_PACK_BYTES, ObjectSettings
from kvstore.objects.store import ObjectStore
from kvstore.objects.takers import IntoBuffers, PastCallback
from kvstore.objects.writer import Writer
from kvstore.types import Call, Presence, PutStatus, ReadStatus

_MAINTAIN_S: Final = 0.05  # background work per call; the core calls about once a second


class _Session:
    """What exists between open and close."""

    def __init__(self, store: ObjectStore) -> None:
        self.pid = os.getpid()
        self.described = not store.context.namespace  # whether the namespace's description is kept
        self.store = store
        self.writer = Writer(store)
        self.finder = Finder(store)
        self.remover = Remover(store, self.finder)
        self.epochs = Epochs(store)
        self.drops = Drops(store)


class ObjectBackend(Backend):
    """Records in packs on an :class:`~kvstore.objects.medium.ObjectMedium`.

    A subclass says how to reach the medium and how to treat it.  Thread-safe.  An object inherited
    over a fork raises :class:`~kvstore.errors.ClosedError`; ``open`` in the child works.
    """

    capabilities: ClassVar[Capability] = (
        Capability.PERSISTENT
        | Capability.SHARED
        | Capability.READ_INTO
        | Capability.PARALLEL
        | Capability.PACKS
        | Capability.CONDITIONAL_PUT
        | Capability.SCAN
        | Capability.RANGES
    )

    def __init__(self) -> None:
        self._session: _Session | None = None

    @abstractmethod
    def connect(self, context: BackendContext) -> ObjectMedium:
        """Reach the medium and prove that it can be used; called by :meth:`open`."""

    @abstractmethod
    def settings(self, context: BackendContext) -> ObjectSettings:
        """How to treat the medium; called by :meth:`open`."""

    def open(self, context: BackendContext) -> None:
        """Open or create the store; see :class:`~kvstore.backend.Backend`."""
        if self._session is not None and self._session.pid == os.getpid():
            msg = f"tier {context.tier!r}: this backend is open already; close it first"
            raise ConfigError(msg)
        settings = self.settings(context)
        store = ObjectStore(self.connect(context), settings, context)
        self._session = _Session(store)
        if settings.survey_interval_s:
            store.fanout.background(store.space.maintain)  # what a crash left must not wait for the upkeep

    def close(self) -> None:
        """Stop the threads and let go of the medium."""
        session, self._session = self._session, None
        if session is not None and session.pid == os.getpid():
            session.store.close()

    def _opened(self) -> _Session:
        session = self._session
        if session is None:
            msg = f"this {type(self).__name__} is not open"
            raise ClosedError(msg)
        if session.pid != os.getpid():
            msg = f"this {type(self).__name__} was inherited over a fork; open one in the child process"
            raise ClosedError(msg)
        return session

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Read objects by several threads; each record passes through memory of the engine."""
        return read_many(self._opened().store, names, PastCallback(receive), call)

    def get_ranges(
        self, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
    ) -> list[ReadStatus]:
        """Read parts of records: with a request each from 1 MiB on, else from the object read as it is."""
        return read_many(self._opened().store, names, PastCallback(receive, ranges), call)

    def _writable(self) -> _Session:
        session = self._opened()
        if session.store.context.read_only:
            msg = f"tier {session.store.context.tier!r} is open read-only: deleting is refused"
            raise BackendPermissionError(msg)
        return session

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        """Read objects by several threads, each record straight into its buffers."""
        return read_many(self._opened().store, names, IntoBuffers(place, done), call)

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Write runs of blocks as packs, everything else as an object each, several at once."""
        session = self._opened()
        if session.store.context.read_only:
            return [PutStatus.READ_ONLY] * len(items)
        statuses = session.writer.put_many(items, call)
        if not session.described and PutStatus.STORED in statuses:
            session.described = True
            store = session.store
            store.fanout.background(
                lambda: session.epochs.describe(store.context.namespace, store.context.namespace_json)
            )
        return statuses

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Answer from memory, by a search along the run, or by a look at each object."""
        return self._opened().finder.exists_many(names, call)

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """Remove the objects that hold the names; blocks in the same pack become misses with them."""
        return self._writable().remover.delete_many(names, call)

    def discard(self, name: bytes, header_checksum: int) -> None:
        """Remove the object that holds a bad record; the blocks in the same pack become misses with it."""
        self._opened().remover.discard(name, header_checksum)

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        """Read the epoch, at most ``settings.epoch_age_s`` old."""
        return self._opened().epochs.get(namespace, bump=bump)

    def description(self, namespace: bytes) -> bytes | None:
        """Return the readable description that is kept for a namespace, for tools; None when there is none."""
        return self._opened().epochs.description(namespace)

    def touch_many(self, names: Sequence[bytes]) -> None:
        """Note uses; :meth:`maintain` refreshes objects that are old enough for it."""
        self._opened().store.ages.used(names)

    def drop(self, name_prefix: bytes) -> None:
        """Note the prefix on the medium; :meth:`maintain` reclaims it bit by bit, also after a restart."""
        self._opened().drops.request(name_prefix)

    def namespaces(self) -> list[bytes]:
        """Read the descriptions beside the records."""
        return self._opened().epochs.descriptions()

    def scan(self) -> Iterator[RecordInfo]:
        """List records by reading the index of every object."""
        return scan(self._opened().store)

    def usage(self) -> Usage:
        """Own writes at once, those of others as of the last listing."""
        return self._opened().store.space.usage()

    def gc(self, *, max_age_s: float | None = None, max_bytes: int | None = None) -> tuple[int, int]:
        """Remove what was not used for a time, then the oldest until the rest fits.

        Returns:
            Records and bytes removed.
        """
        return collect(self._writable().store, max_age_s, max_bytes)

    def maintain(self) -> None:
        """Refresh used objects, reclaim drops, list and evict when that is due."""
        session = self._opened()
        session.store.medium.maintain()
        session.store.ages.flush()
        session.store.space.maintain()
        session.drops.reclaim(_MAINTAIN_S)

    def describe(self) -> dict[str, str]:
        """Facts for ``stat`` and ``doctor``."""
        store = self._opened().store
        packs = f"runs of up to {store.pack_blocks} blocks" if store.pack_blocks > 1 else "off"
        return {**store.medium.describe(), "packs": packs, "parallel requests": str(store.settings.threads)}

    def batch_shape(self) -> BatchShape:
        """One pack a batch, ending where packs end."""
        store = self._opened().store
        block_bytes = store.context.block_bytes
        nbytes = 2 * store.pack_blocks * block_bytes if block_bytes else 2 * MAX_PACK_BYTES
        return BatchShape(blocks=max(store.pack_blocks, 1), nbytes=max(nbytes, 8 << 20), align=store.pack_blocks)
