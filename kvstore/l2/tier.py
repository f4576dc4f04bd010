"""One L2 tier: an open backend behind names, deadlines, a breaker and counters."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.backend import Backend, Capability, PutItem, Receive, Usage
from kvstore.counting import Counting
from kvstore.errors import (
    BackendError,
    BackendPermissionError,
    BackendTimeoutError,
    BackendUnavailableError,
    ClosedError,
    KVStoreError,
    PluginError,
)
from kvstore.l2.breaker import Breaker
from kvstore.l2.counters import TierCounters
from kvstore.l2.workers import Job, WorkerPool
from kvstore.types import Call, Presence, PutStatus, ReadStatus

if TYPE_CHECKING:
    from kvstore.config import TierConfig
    from kvstore.events import EventKind
    from kvstore.plugins import BackendPlugin

T = TypeVar("T")

logger = logging.getLogger("kvstore.tier")

_STORED: Final = frozenset({PutStatus.STORED, PutStatus.EXISTS})
_FAILURES: Final[dict[ReadStatus | PutStatus, type[BackendError]]] = {
    ReadStatus.TIMEOUT: BackendTimeoutError,
    PutStatus.TIMEOUT: BackendTimeoutError,
    ReadStatus.UNAVAILABLE: BackendUnavailableError,
    PutStatus.UNAVAILABLE: BackendUnavailableError,
    ReadStatus.DENIED: BackendPermissionError,
    PutStatus.DENIED: BackendPermissionError,
}
"""Statuses that mean the medium failed; when nothing of a call went well they count like an error."""

_WRITES: Final = frozenset({"put_many", "delete_many", "discard", "clear", "touch_many", "maintain"})
_LOG_INTERVAL_S: Final = 60.0
_WORKERS: Final = 4  # 2-4 threads saturate a local disk
_SHARED_BYTES: Final = 4 << 20  # 4 MiB: half a millisecond of verifying, several hand-offs to a thread
_SHARED_BLOCK_BYTES: Final = 128 << 10  # smaller blocks spend their time in the interpreter, one thread at a time


def name_prefix(namespace: bytes, epoch: bytes) -> bytes:
    """First 16 bytes of every stored name: the namespace with the tier's epoch mixed in."""
    return hashlib.sha256(b"kvstore-name-v1" + namespace + epoch).digest()[:16]


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
        # a medium that cannot write may well be read, so each side is suspended on its own
        self._breakers = {writes: Breaker(self._side(writes), on_change=self._changed) for writes in (False, True)}
        self.bit = 1 << settings.index
        """This tier's bit in an L1 entry's ``stored`` and ``pending`` masks."""
        self.direct = bool(backend.capabilities & Capability.CALLER_READS)
        default = min(_WORKERS, os.cpu_count() or 1) if self.direct else _WORKERS
        self.workers = WorkerPool(f"kvstore-{settings.name}", settings.config.workers or default)
        self.decoding = False
        """Whether the newest record that was read had to be decoded; steers a preference only."""
        self._named: tuple[bytes, bytes] | None = None  # (epoch, name prefix), replaced as one
        self.refusal = ""
        """Why the newest put stored nothing, such as ``full`` or ``read_only``; empty when it did."""
        self._refusal_logged_at = float("-inf")

    @property
    def name(self) -> str:
        """The tier's name in config, counters and messages."""
        return self.settings.name

    def _side(self, writes: bool) -> str:
        return f"{self.settings.name!r} ({'writes' if writes else 'reads'})"

    def _changed(self, side: str, state: str) -> None:
        self.emit("tier", (), f"{side} {state}")

    def emit(self, kind: EventKind, digests: Sequence[bytes], detail: str = "") -> None:
        """Queue an event about this tier for the observers."""
        self.settings.on_event(kind, self.name, digests, detail)

    # -- the border to foreign code

    def guarded(self, operation: str, fn: Callable[[], T]) -> T | None:
        """Run a backend operation; any failure is counted, feeds the breaker and gives None."""
        breaker = self._breakers[operation in _WRITES]
        if not breaker.allow():
            self.counters.add(rejected_by_breaker=1)
            return None
        try:
            result = fn()
        except (BackendError, ClosedError) as e:
            self.failed(operation, e)
        except Exception as e:  # noqa: BLE001 - border: a plugin's bug must not reach the engine
            self.failed(operation, PluginError(f"backend {self.settings.plugin.name!r} raised in {operation}: {e!r}"))
        except BaseException:
            breaker.left()
            raise
        else:
            breaker.succeeded(operation)
            return result
        return None

    def failed(self, operation: str, error: KVStoreError) -> None:
        """Note a failed operation: a counter, the breaker, at most one log line a minute."""
        if isinstance(error, BackendTimeoutError):
            self.counters.add(timeouts=1)
        else:
            self.counters.add(io_errors=1)
        self._breakers[operation in _WRITES].failed(operation, error)

    @property
    def suspended(self) -> bool:
        """Whether reads are not tried at the moment, so that the tier serves nothing."""
        return self._breakers[False].state != "closed"

    @property
    def last_error(self) -> str:
        """The newest failure that no success has followed; empty when all is well."""
        return self._breakers[False].last_error or self._breakers[True].last_error

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

    def prefix(self, kind: int) -> bytes:
        """17-byte start of the names of one key kind in the tier's current epoch; may raise."""
        epoch = self.backend.epoch(self.settings.namespace)
        named = self._named
        if named is None or named[0] != epoch:
            changed = named is not None
            named = (epoch, name_prefix(self.settings.namespace, epoch))
            self._named = named
            if changed:  # another process cleared this namespace
                self.settings.on_new_epoch()
        return named[1] + bytes([kind])

    def prefix_for_writes(self, kind: int) -> bytes | None:
        """Like ``prefix``, but bounded by the deadline and without asking a slow medium each time.

        A tier that is read by its own threads is asked once and then once a second by the upkeep
        thread; until that notices, writes go to the epoch that another process has just ended,
        where nobody finds them.  None when the tier cannot be asked.
        """
        if self.direct:
            return self.guarded("epoch", lambda: self.prefix(kind))
        named = self._named
        if named is not None:
            return named[1] + bytes([kind])
        call = self.call()
        return self.guarded("epoch", lambda: self.in_worker(lambda: self.prefix(kind), call))

    def names(self, kind: int, digests: Sequence[bytes]) -> list[bytes]:
        """Stored names of blocks; asks the backend for the epoch, so it may raise."""
        prefix = self.prefix(kind)
        return [prefix + digest for digest in digests]

    # -- existence

    def presence(self, kind: int, digests: Sequence[bytes], call: Call) -> list[Presence]:
        """Presence of each block; all UNKNOWN when the tier could not be asked."""

        def ask() -> list[Presence]:
            names = self.names(kind, digests)
            found = self.backend.exists_many(names, call)
            if _wrong_length(found, len(names)):
                msg = f"exists_many answered {found!r:.80} for {len(names)} names; expected one Presence per name"
                raise PluginError(msg)
            return found

        run = ask if self.direct else lambda: self.in_worker(ask, call)
        found = self.guarded("exists_many", run)
        return found if found is not None else [Presence.UNKNOWN] * len(digests)

    def leading(self, kind: int, digests: Sequence[bytes], until: float | None = None) -> int:
        """How many leading blocks the tier says it holds."""
        if not digests:
            return 0
        found = self.presence(kind, digests, self.call(until, leading_only=True))
        return next((i for i, p in enumerate(found) if p is not Presence.PRESENT), len(found))

    # -- bytes

    def read(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Ask the backend for records in the current thread; checks the form of its answer."""
        statuses = self.backend.get_many(names, receive, call)
        if _wrong_length(statuses, len(names)):
            msg = f"get_many answered {statuses!r:.80} for {len(names)} names; expected one ReadStatus per name"
            raise PluginError(msg)
        if ReadStatus.OK not in statuses:
            _raise_for(statuses, self.name)
        return statuses

    def put(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """Store records in the current thread; a failing backend gives UNAVAILABLE for each."""

        def store() -> list[PutStatus]:
            statuses = self.backend.put_many(items, call)
            if _wrong_length(statuses, len(items)):
                msg = f"put_many answered {statuses!r:.80} for {len(items)} items; expected one PutStatus per item"
                raise PluginError(msg)
            if not _STORED.intersection(statuses):
                _raise_for(statuses, self.name)
            return statuses

        statuses = self.guarded("put_many", store)
        if statuses is None:
            return [PutStatus.UNAVAILABLE] * len(items)
        self._note_refusal("" if _STORED.intersection(statuses) else statuses[0].value if statuses else "")
        return statuses

    def _note_refusal(self, reason: str) -> None:
        """Remember whether the medium stores at all; says so when that changes, at most once a minute."""
        if reason and not self.refusal and time.monotonic() - self._refusal_logged_at >= _LOG_INTERVAL_S:
            self._refusal_logged_at = time.monotonic()
            logger.warning("tier %r stores nothing (%s); puts are refused and counted", self.name, reason)
        self.refusal = reason

    def discard(self, name: bytes, header_checksum: int, *, in_worker: bool) -> None:
        """Drop a record that failed verification; a caller's thread does not wait for a writer."""

        def drop() -> None:
            self.backend.discard(name, header_checksum)

        call = self.call()
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
        with contextlib.suppress(BackendUnavailableError):  # every thread is stuck, which is known already
            self.workers.submit(Job(lambda: self.guarded("touch_many", note)))

    def delete(self, kind: int, digests: Sequence[bytes]) -> int:
        """Delete blocks; 0 when the tier could not be asked."""
        call = self.call()

        def drop() -> int:
            return self.backend.delete_many(self.names(kind, digests), call)

        return self.guarded("delete_many", lambda: self.in_worker(drop, call)) or 0

    def clear(self) -> None:
        """Start a new epoch and let the backend reclaim the old one."""
        call = self.call()

        def bump() -> None:
            namespace = self.settings.namespace
            old = name_prefix(namespace, self.backend.epoch(namespace))
            epoch = self.backend.epoch(namespace, bump=True)
            self._named = (epoch, name_prefix(namespace, epoch))
            self.backend.drop(old)

        self.guarded("clear", lambda: self.in_worker(bump, call))

    # -- upkeep

    def usage(self) -> Usage | None:
        """Space on the medium, None when the tier cannot say."""
        return self.guarded("usage", self.backend.usage)

    def maintain(self) -> None:
        """Background work, from the cache's upkeep thread; also notices clears of other processes."""
        call = self.call()
        for operation, fn in (("epoch", lambda: self.prefix(0)), ("maintain", self.backend.maintain)):
            self.guarded(operation, fn if self.direct else functools.partial(self.in_worker, fn, call))

    def close(self) -> None:
        """Close the backend; errors are logged, never raised."""
        try:
            self.workers.run(self.backend.close, Call.within(5.0))
        except Exception as e:  # noqa: BLE001 - border: closing must go on with the other tiers
            logger.warning("tier %r did not close cleanly: %s", self.name, e)
        self.workers.close()


def _wrong_length(answer: object, expected: int) -> bool:
    """A plugin may answer anything, whatever its annotations say."""
    return not isinstance(answer, list) or len(answer) != expected


def _raise_for(statuses: Sequence[ReadStatus | PutStatus], tier: str) -> None:
    for status, error in _FAILURES.items():
        if status in statuses:
            msg = f"the backend of tier {tier!r} answered {status.value}"
            raise error(msg)
