"""A timed self-test of an opened backend with a few throw-away records."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.backend import Finding, PutItem
from kvstore.cli.bounded import bounded
from kvstore.cli.output import size
from kvstore.types import Call, Presence, PutStatus, ReadStatus

if TYPE_CHECKING:
    from kvstore.backend import Backend

_RECORDS: Final = 8
_LAYER_BYTES: Final = 16 << 10  # of the made-up block: 16 tokens of K and V of 256 bfloat16 each
_MAX_LAYERS: Final = 64  # 1 MiB a record: large enough for a bandwidth, 8 of them quick on a slow link
_SHARE: Final = 64  # all records together take an eighth of the smallest capacity at most
_CALL_S: Final = 10.0
_LIMIT_S: Final = 15.0  # for a backend that ignores the deadline of its call
_REPEATS: Final = 3
_QUICK_S: Final = 1.0  # reads of a batch are repeated then; a slow link is not to be kept busy
_STORED: Final = (PutStatus.STORED, PutStatus.EXISTS)

_REFUSALS: Final = {
    PutStatus.FULL: "the medium has no room and could not make any: free space, or lower the capacity",
    PutStatus.READ_ONLY: "the medium is read-only: reads are served, but nothing is stored",
    PutStatus.DENIED: "writing is not permitted: check owner, mode or credentials",
    PutStatus.TIMEOUT: "the medium is slower than 8 records in 10 s",
    PutStatus.TOO_LARGE: "the record is larger than this medium takes",
    PutStatus.UNAVAILABLE: "the medium does not answer; its log line says why",
}


@dataclass(frozen=True, slots=True)
class Timings:
    """What the self-test measured; seconds, reads and one-record figures the best of three.

    Attributes:
        records: Records of a batch.
        record_bytes: Length of each.
        put_s: One put_many of all of them.
        get_s: One get_many of all of them, each copied once; what was just written may come from a cache.
        one_put_s: Storing a single record.
        one_get_s: Reading a single record.
        exists_s: Asking for all of them.
        delete_s: Deleting all of them.
    """

    records: int
    record_bytes: int
    put_s: float
    get_s: float
    one_put_s: float
    one_get_s: float
    exists_s: float
    delete_s: float

    @property
    def text(self) -> str:
        """One line for people."""
        nbytes = self.records * self.record_bytes
        return (
            f"self-test with {self.records} records of {size(self.record_bytes)}: "
            f"put {_rate(nbytes, self.put_s)}, get {_rate(nbytes, self.get_s)}; "
            f"one record: put {self.one_put_s * 1e3:.1f} ms, get {self.one_get_s * 1e3:.1f} ms"
        )

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        nbytes = self.records * self.record_bytes
        seconds = ("put_s", "get_s", "one_put_s", "one_get_s", "exists_s", "delete_s")
        return {
            "records": self.records,
            "record_bytes": self.record_bytes,
            **{name: round(getattr(self, name), 6) for name in seconds},
            "put_mb_s": round(nbytes / self.put_s / 1e6, 1),
            "get_mb_s": round(nbytes / self.get_s / 1e6, 1),
        }


class SelfTest:
    """Puts, finds, reads and deletes records of a random namespace, so that no cache ever meets them.

    The records are real ones: a copy that a killed process leaves behind is evicted like any other.
    """

    def __init__(self, backend: Backend, capacity_bytes: int | None) -> None:
        self._backend = backend
        room = _MAX_LAYERS if capacity_bytes is None else capacity_bytes // _SHARE // _LAYER_BYTES
        self._items = _records(max(1, min(_MAX_LAYERS, room)), _RECORDS + _REPEATS)
        self._expected = [b"".join(item.buffers) for item in self._items]

    def run(self) -> tuple[Timings | None, list[Finding]]:
        """Run every step; the timings are None when one went wrong.

        Raises:
            BackendError: The medium failed or did not answer in time; the records stay to be evicted.
        """
        batch = list(range(_RECORDS))
        statuses, put_s = self._timed("put", lambda call: self._backend.put_many(self._chosen(batch), call))
        findings = _refused(statuses)
        one_put_s = min(self._timed("put", self._put_one(i))[1] for i in range(_RECORDS, len(self._items)))
        found, exists_s = self._timed("exists", lambda call: self._backend.exists_many(self._names(batch), call))
        get_s, wrong = self._get(batch)
        if get_s < _QUICK_S:
            get_s = min(get_s, *(self._get(batch)[0] for _ in range(_REPEATS - 1)))
        one_get_s = min(self._get([i])[0] for i in range(_REPEATS))
        _, delete_s = self._timed("delete", lambda call: self._backend.delete_many(self._all_names(), call))
        if not findings:
            findings = wrong or _unknown(found)
        findings += self._left()
        if findings:
            return None, findings
        return Timings(_RECORDS, self._items[0].nbytes, put_s, get_s, one_put_s, one_get_s, exists_s, delete_s), []

    def _timed(self, what: str, step: Callable[[Call], Any]) -> tuple[Any, float]:
        started = time.perf_counter()
        result = bounded(f"self-test, {what}", _LIMIT_S, lambda: step(Call.within(_CALL_S)))
        return result, max(time.perf_counter() - started, 1e-9)

    def _chosen(self, indices: Sequence[int]) -> list[PutItem]:
        return [self._items[i] for i in indices]

    def _names(self, indices: Sequence[int]) -> list[bytes]:
        return [self._items[i].name for i in indices]

    def _all_names(self) -> list[bytes]:
        return [item.name for item in self._items]

    def _put_one(self, index: int) -> Callable[[Call], Any]:
        return lambda call: self._backend.put_many(self._chosen([index]), call)

    def _get(self, indices: Sequence[int]) -> tuple[float, list[Finding]]:
        received: dict[int, bytes] = {}

        def receive(i: int, view: memoryview) -> None:
            received[i] = bytes(view)

        names = self._names(indices)
        statuses, seconds = self._timed("get", lambda call: self._backend.get_many(names, receive, call))
        missed = sorted({status.value for status in statuses if status is not ReadStatus.OK})
        if missed:
            what = f"self-test: reading back what was just stored gave {', '.join(missed)}"
            return seconds, [Finding("problem", what, "see the findings above; is something else deleting here?")]
        if any(received.get(at) != self._expected[index] for at, index in enumerate(indices)):
            return seconds, [Finding("problem", "self-test: other bytes came back than were stored", _DAMAGED)]
        return seconds, []

    def _left(self) -> list[Finding]:
        found, _ = self._timed("exists", lambda call: self._backend.exists_many(self._all_names(), call))
        if Presence.PRESENT not in found:
            return []
        return [Finding("warning", "self-test: deleted records are still said to be there", _STALE)]


_DAMAGED: Final = "do not use this medium: check its hardware, file system or proxy; readers reject such records"
_STALE: Final = "harmless if it ends soon: another process or a cache in between answers"


def _refused(statuses: Sequence[PutStatus]) -> list[Finding]:
    refused = [status for status in statuses if status not in _STORED]
    if not refused:
        return []
    what = f"self-test: {len(refused)} of {len(statuses)} records were refused: {refused[0].value}"
    return [Finding("problem", what, _REFUSALS[refused[0]])]


def _unknown(found: Sequence[Presence]) -> list[Finding]:
    if set(found) == {Presence.PRESENT}:
        return []
    return [Finding("problem", "self-test: records that were stored and read are said to be absent", _STALE)]


def _records(layers: int, count: int) -> list[PutItem]:
    """Make raw records of incompressible blocks under names that nothing else has."""
    from kvstore.blocks import BlockEncoder
    from kvstore.l2.names import name_prefix
    from kvstore.record import RecordMeta
    from kvstore.spec import BlockSpec

    spec = BlockSpec(layers=layers, kv_heads=1, head_dim=256, block_tokens=16, dtype="bfloat16")
    namespace = secrets.token_bytes(16)
    prefix = name_prefix(namespace, secrets.token_bytes(8)) + b"\1"
    encoder = BlockEncoder(spec, namespace, None)
    items = []
    for _ in range(count):
        block = secrets.token_bytes(spec.nbytes)
        digest = hashlib.sha256(block).digest()
        record = encoder.encode(memoryview(block), RecordMeta(digest, parent_known=False))
        head, *payload = record.buffers
        items.append(PutItem(prefix + digest, [bytes(head), *payload], head_bytes=len(head)))
    return items


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e6:,.0f} MB/s ({seconds * 1e3:.1f} ms)"
