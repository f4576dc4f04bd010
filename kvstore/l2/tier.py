"""One L2 tier: an open backend behind names, deadlines, a breaker and counters."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.backend import Backend, Capability, Place, PutItem, Receive, Usage
from kvstore.counting import Counting
from kvstore.errors import (
    BackendUnavailableError,
    KVStoreError,
)
from kvstore.history import Event, History
from kvstore.l2.answers import checked, raise_failure, raise_unknown
from kvstore.l2.border import READING, Border
from kvstore.l2.counters import TierCounters
from kvstore.l2.names import TierNames
from kvstore.l2.part import Part
from kvstore.l2.promises import Promises
from kvstore.l2.workers import Job, WorkerPool
from kvstore.types import Call, Presence, PutStatus, ReadStatus

if TYPE_CHECKING:
    from kvstore.config import TierConfig
    from kvstore.events import EventKind
    from kvstore.keys import KVCacheKey
    from kvstore.l2.bad_record import BadRecord
    from kvstore.plugins import BackendPlugin

T = TypeVar("T")

logger = logging.getLogger("kvstore.tier")

_STORED: Final = frozenset({PutStatus.STORED, PutStatus.EXISTS})
_COUNTER_OF_REASON: Final = {"key": "key_mismatch", "spec": "spec_mismatch", "tag": "unauthenticated"}
_LOG_INTERVAL_S: Final = 60.0
_WORKERS: Final = 4  # 2-4 threads saturate a local disk
_PARALLEL_WORKERS: Final = 16  # these only wait for the backend's own threads, one for each read under way
_WAITING_NOTES: Final = 64  # touches that a slow medium may owe; more are dropped
_CLOSE_S: Final = 5.0
_SHARED_BYTES: Final = 4 << 20  # 4 MiB: half a millisecond of verifying, several hand-offs to a thread
_SHARED_BLOCK_BYTES: Final = 128 << 10  # smaller blocks spend their time in the interpreter, one thread at a time


@dataclass(slots=True)
class TierSettings:
    """Values of a tier with every default resolved."""

    config: TierConfig
    plugin: BackendPlugin
    index: int
    deadline_s: float
    queue_bytes: int
    namespace: bytes
    on_new_epoch: Callable[[], None]
    on_event: Callable[[EventKind, str, Sequence[bytes], str], None]

    @property
    def name(self) -> str:
        """The tier's name in config, counters and messages."""
        return self.config.name


class Tier:
    """Calls a backend so that whatever it does wrong becomes a miss and a count.

    Thread-safe.  No data method raises for what the backend does; ``None`` stands for "could not
    be asked".
    """

    def __init__(self, settings: TierSettings, backend: Backend) -> None:
        self.settings = settings
        self.backend = backend
        self.counters = Counting(TierCounters())
        self._border = Border(settings.name, settings.plugin.name, self.counters, settings.deadline_s, self._changed)
        self._names = TierNames(backend, settings.namespace, self._new_epoch)
        self.history = History()
        """What happened to blocks here, for ``explain``."""
        self.bit = 1 << settings.index
        """This tier's bit in an L1 entry's ``stored`` and ``pending`` masks."""
        capabilities = backend.capabilities
        self.direct = bool(capabilities & Capability.CALLER_READS)
        self.parallel = bool(capabilities & Capability.PARALLEL)
        """Whether a read is handed to the backend whole instead of in shares."""
        self.places = bool(capabilities & Capability.READ_INTO)
        self.asks_by_reading = bool(capabilities & Capability.PACKS)
        """Whether asking for existence costs as much as reading: one request per object."""
        self.promises = Promises()
        self.workers = WorkerPool(f"kvstore-{settings.name}", settings.config.workers or self._threads())
        # what nobody waits for must not stand before a read
        self._notes = WorkerPool(f"kvstore-{settings.name}-notes", 1)
        self._upkeep = WorkerPool(f"kvstore-{settings.name}-upkeep", 1)
        self.decoding = False
        """Whether the newest record that was read had to be decoded; steers a preference only."""
        self.refusal = ""
        """Why the newest put stored nothing, such as ``full`` or ``read_only``; empty when it did."""
        self._refusal_logged_at = float("-inf")

    def _threads(self) -> int:
        if self.parallel:
            return _PARALLEL_WORKERS
        return min(_WORKERS, os.cpu_count() or 1) if self.direct else _WORKERS

    @property
    def name(self) -> str:
        """The tier's name in config, counters and messages."""
        return self.settings.name

    def _changed(self, side: str, state: str) -> None:
        self.emit("tier", (), f"{side} {state}")

    def _new_epoch(self) -> None:
        self.history.clear("by another cache or process")
        self.settings.on_new_epoch()

    def emit(self, kind: EventKind, digests: Sequence[bytes], detail: str = "") -> None:
        """Queue an event about this tier for the observers."""
        self.settings.on_event(kind, self.name, digests, detail)

    # -- the border to foreign code

    def guarded(self, operation: str, fn: Callable[[], T]) -> T | None:
        """Run a backend operation; any failure is counted, feeds the breaker and gives None."""
        return self._border.guarded(operation, fn)

    def failed(self, operation: str, error: KVStoreError) -> None:
        """Note a failed operation: a counter, the breaker, at most one log line a minute."""
        self._border.failed(operation, error)

    def probe(self, part: Part) -> None:
        """For a suspended tier of slow media: try in the background whether it is back; nobody waits.

        Reads the first block of what was asked for, whatever it was: that proves all there is to prove.
        """
        first = part.among([0])
        call = self.call()

        def read() -> None:
            self.read(self.names_of(first, call), _ignore, call)

        self._border.probe(READING, read, self._notes)

    @property
    def suspended(self) -> bool:
        """Whether reads are not tried at the moment, so that the tier serves nothing."""
        return self._border.suspended

    @property
    def last_error(self) -> str:
        """The newest failure that no success has followed; empty when all is well."""
        return self._border.last_error

    def shares(self, blocks: int, block_bytes: int) -> bool:
        """Whether reading blocks into the cache's own memory is worth several threads.

        Always for media that callers must not wait for; for others when there is enough to do.
        """
        if not self.direct:
            return True
        large = block_bytes >= _SHARED_BLOCK_BYTES and blocks * block_bytes >= _SHARED_BYTES
        return large and self.workers.size > 1

    def in_worker(self, fn: Callable[[], T], call: Call) -> T:
        """Run something that may block in the tier's own threads, bounded by the call's deadline."""
        return self.workers.run(fn, call)

    def call(self, until: float | None = None, *, leading_only: bool = False) -> Call:
        """Limits for one operation from now: the tier's deadline, or ``until`` when that is sooner."""
        call = Call.within(self.settings.deadline_s, leading_only=leading_only)
        if until is not None and until < call.deadline:
            call.deadline = until
        return call

    # -- names

    def names(self, kind: int, digests: Sequence[bytes]) -> list[bytes]:
        """Stored names of blocks; asks the backend for the epoch, so it may raise."""
        return self._names.of(kind, digests)

    def names_of(self, part: Part, call: Call) -> list[bytes]:
        """Like ``names``, and tells ``call`` which sequence they belong to where that helps the backend."""
        return self._names.of_part(part, call)

    def prefix_for_writes(self, kind: int) -> bytes | None:
        """17-byte start of the names of one key kind, for writes; None when the tier cannot be asked.

        Bounded by the deadline, and a slow medium is not asked each time: a tier that is read by
        its own threads is asked once and then once a second by the upkeep thread.  Until that
        notices, writes go to the epoch that another process has just ended, where nobody finds them.
        """
        if self.direct:
            return self.guarded("epoch", lambda: self._names.prefix(kind))
        known = self._names.known_prefix(kind)
        if known is not None:
            return known
        call = self.call()
        return self.guarded("epoch", lambda: self.in_worker(lambda: self._names.prefix(kind), call))

    def note_names(self, names: Sequence[bytes], event: Event, detail: str = "") -> None:
        """Remember what happened to records; those of other namespaces and epochs are no business of ours."""
        mine = self._names.known_prefix(0)
        if mine is not None:
            self.history.note([name[17:] for name in names if name.startswith(mine[:16])], event, detail)

    # -- existence

    def presence(self, part: Part, call: Call) -> list[Presence]:
        """Presence of each block; all UNKNOWN when the tier could not be asked."""

        def ask() -> list[Presence]:
            began_late = call.stop()
            names = self.names_of(part, call)
            found = self.checked("exists_many", self.backend.exists_many(names, call), len(names))
            if not began_late:
                raise_unknown(found, call, self.name)
            return found

        found = None
        if self.direct:
            found = self.guarded("exists_many", ask)
        elif self.suspended:
            self.probe(part)
        else:
            found = self.guarded("exists_many", lambda: self.in_worker(ask, call))
        return found if found is not None else [Presence.UNKNOWN] * len(part)

    def leading(self, key: KVCacheKey, start: int = 0, until: float | None = None) -> int:
        """How many blocks from ``key[start]`` on the tier says it holds, up to the first hole."""
        return self.ask_leading(key, start, until) or 0

    def ask_leading(self, key: KVCacheKey, start: int, until: float | None) -> int | None:
        """Like ``leading``, and None when the tier gave no answer."""
        if start >= len(key):
            return 0
        found = self.presence(Part.rest(key, start), self.call(until, leading_only=True))
        run = next((i for i, p in enumerate(found) if p is not Presence.PRESENT), len(found))
        if run and self.asks_by_reading:
            self.promises.note(key.digests[start + run - 1])
        return None if run == 0 and found[0] is Presence.UNKNOWN else run

    # -- bytes

    def read(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Ask the backend for records in the current thread; checks the form of its answer."""
        return self._read_answer("get_many", self.backend.get_many(names, receive, call), len(names))

    def read_into(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        """Like ``read``, with the backend writing into the buffers that ``place`` gives."""
        return self._read_answer("read_many", self.backend.read_many(names, place, done, call), len(names))

    def _read_answer(self, operation: str, answer: list[ReadStatus], expected: int) -> list[ReadStatus]:
        statuses = self.checked(operation, answer, expected)
        if ReadStatus.OK not in statuses:
            raise_failure(statuses, self.name)
        return statuses

    def checked(self, operation: str, answer: list[T], expected: int) -> list[T]:
        """A backend's answer, if it has the form that the contract wants.

        Raises:
            PluginError: It has not.
        """
        return checked(operation, answer, expected)

    def put(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Store records in the current thread; a backend that does not answer gives UNAVAILABLE for each."""
        said: list[PutStatus] = []

        def store() -> list[PutStatus]:
            statuses = self.checked("put_many", self.backend.put_many(items, call), len(items))
            said.extend(statuses)
            if not _STORED.intersection(statuses):
                raise_failure(statuses, self.name)
            return statuses

        statuses = self.guarded("put_many", store)
        if statuses is None:
            return said or [PutStatus.UNAVAILABLE] * len(items)
        self._note_refusal("" if _STORED.intersection(statuses) else statuses[0].value if statuses else "")
        return statuses

    def _note_refusal(self, reason: str) -> None:
        """Remember whether the medium stores at all; says so when that changes, at most once a minute."""
        if reason and not self.refusal and time.monotonic() - self._refusal_logged_at >= _LOG_INTERVAL_S:
            self._refusal_logged_at = time.monotonic()
            logger.warning("tier %r stores nothing (%s); puts are refused and counted", self.name, reason)
        self.refusal = reason

    # -- small changes

    def condemn(self, bad: BadRecord, *, in_worker: bool) -> None:
        """Count and drop a record that failed verification, so that it is not offered again.

        A caller's thread does not wait for a writer.
        """
        reason = bad.error.reason
        counter = _COUNTER_OF_REASON.get(reason, "corrupt")
        self.counters.add(**{counter: 1})
        self.emit("corrupt", (bad.name[-32:],), reason)
        self.note_names((bad.name,), Event.CORRUPT, reason)
        call = self.call()
        call.run = bad.run

        def drop() -> None:
            if bad.header_checksum is None:  # nothing of it was read, so it cannot be told from a repaired one
                self.backend.delete_many([bad.name], call)
            else:
                self.backend.discard(bad.name, bad.header_checksum)

        self.guarded("discard", drop if in_worker else lambda: self.in_worker(drop, call))

    def touch(self, kind: int, digests: Sequence[bytes]) -> None:
        """Note one use of blocks given in key order; lossy, and never waits for a slow medium."""
        if not digests:
            return
        tail_first = digests[::-1]

        def note() -> None:
            self.backend.touch_many(self.names(kind, tail_first))

        if self.direct:
            self.guarded("touch_many", note)
            return
        if self._notes.waiting >= _WAITING_NOTES:
            return
        with contextlib.suppress(BackendUnavailableError):  # the thread is stuck, which is known already
            self._notes.submit(Job(lambda: self.guarded("touch_many", note), patience_s=self.settings.deadline_s))

    def in_background(self, work: Callable[[], None], patience_s: float) -> bool:
        """Run something that nobody waits for; False when it is not, since the thread is stuck or the tier closed.

        Args:
            work: Ends by itself, within the deadlines of its calls.
            patience_s: After so long its thread counts as stuck.
        """
        try:
            self._notes.submit(Job(work, patience_s=patience_s))
        except BackendUnavailableError:
            return False
        return True

    def delete(self, part: Part) -> int:
        """Delete blocks; 0 when the tier could not be asked."""
        call = self.call()

        def drop() -> int:
            return self.backend.delete_many(self.names_of(part, call), call)

        deleted = self.guarded("delete_many", lambda: self.in_worker(drop, call))
        if deleted is not None:
            self.history.note(part.digests, Event.DELETED)
        return deleted or 0

    def clear(self) -> None:
        """Start a new epoch and let the backend reclaim the old one."""
        call = self.call()
        if self.guarded("clear", lambda: self.in_worker(self._names.renew, call)) is not None:
            self.history.clear("by this process")

    # -- upkeep

    def usage(self) -> Usage | None:
        """Space on the medium, None when the tier cannot say."""
        return self.guarded("usage", self.backend.usage)

    def maintain(self) -> None:
        """Background work, from the cache's upkeep thread; also notices clears of other processes."""
        call = self.call()
        for operation, fn in (("epoch", lambda: self._names.prefix(0)), ("maintain", self.backend.maintain)):
            self.guarded(operation, fn if self.direct else functools.partial(self._upkeep.run, fn, call))

    def close(self) -> None:
        """Close the backend; errors are logged, never raised."""
        for pool in (self._notes, self._upkeep):  # what they still have to say is of no use to anybody
            pool.close(drop=True)
        closer = WorkerPool(f"kvstore-{self.name}-close", 1)  # the others may be stuck
        try:
            closer.run(self.backend.close, Call.within(_CLOSE_S))
        except Exception as e:  # noqa: BLE001 - border: closing must go on with the other tiers
            logger.warning("tier %r did not close cleanly: %s", self.name, e)
        for pool in (closer, self.workers):
            pool.close()


def _ignore(i: int, view: memoryview) -> None:
    """The record is not wanted."""
