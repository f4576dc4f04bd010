"""What a store at rest tells about some blocks: there, damaged, or absent with what can be inferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from kvstore.backend import Capability
from kvstore.cli.output import age, size
from kvstore.cli.records import check
from kvstore.errors import CorruptRecordError
from kvstore.explain import Cause
from kvstore.types import Call, Presence, ReadStatus, Run

if TYPE_CHECKING:
    from kvstore.cli.prompts import Asked
    from kvstore.cli.store import Store
    from kvstore.keyring import Keyring
    from kvstore.record import Head

_BATCH_BLOCKS: Final = 64
_BATCH_S: Final = 60.0  # nobody waits for an answer here; only a medium that hangs must end
_MOST_LISTED: Final = 1 << 18  # records whose last use is looked up: a few seconds of LMDB
_FULL_SHARE: Final = 0.9  # of its capacity from which on a tier evicts now and then

_CAUSES: Final = {"key": Cause.MISMATCH, "spec": Cause.MISMATCH, "tag": Cause.UNAUTHENTICATED}
_NO_ANSWER: Final = {ReadStatus.TIMEOUT: Cause.NO_ANSWER, ReadStatus.UNAVAILABLE: Cause.TIER_DOWN}


@dataclass(frozen=True, slots=True)
class Resting:
    """One block in one store.

    Attributes:
        cause: As in :class:`kvstore.Cause`.
        detail: One sentence.
        written: Unix time in seconds; 0 when it is not there.
        used: Unix time of the last use as far as the medium knows one, else 0.
        nbytes: Stored bytes.
        codec: Name of its codec.
        parent: Digest of the block before it; None for a first block, or when that is not known.
        position: Index in its sequence; -1 when not known.
    """

    cause: Cause
    detail: str = ""
    written: int = 0
    used: float = 0.0
    nbytes: int = 0
    codec: str = ""
    parent: bytes | None = None
    position: int = -1

    def to_dict(self, index: int, digest: bytes) -> dict[str, Any]:
        """Plain text and numbers, ready for JSON."""
        return {
            "index": index,
            "digest": digest.hex(),
            "cause": self.cause.value,
            "detail": self.detail,
            "written": self.written or None,
            "last_use": self.used or None,
            "stored_bytes": self.nbytes or None,
            "codec": self.codec or None,
        }


ABSENT: Final = Resting(Cause.NOT_STORED)


@dataclass(slots=True)
class Look:
    """Reads blocks of one namespace in one store, and what else there is to know of the store.

    Attributes:
        store: Opened.
        namespace: 16-byte digest.
        fingerprint: Of the block spec.
        keys: Whose tags count; None for any record.
    """

    store: Store
    namespace: bytes
    fingerprint: bytes
    keys: Keyring | None
    uses: dict[bytes, float] = field(default_factory=dict)
    oldest_use: float = 0.0

    def blocks(self, asked: Asked) -> list[Resting]:
        """Look for all blocks and verify those that are there.

        Raises:
            BackendError: The medium failed.
        """
        found = [ABSENT] * len(asked.digests)
        for kind in asked.kinds:
            names = self.names(asked, kind)
            self._list_uses(names)
            for start in range(0, len(names), _BATCH_BLOCKS):
                self._read(asked, names, range(start, min(start + _BATCH_BLOCKS, len(names))), found)
            if any(one is not ABSENT for one in found):
                break
        return found

    def names(self, asked: Asked, kind: int) -> list[bytes]:
        """Stored names in the current epoch."""
        return asked.sought(kind).names(self.namespace, self.store.backend.epoch(self.namespace))

    def present(self, asked: Asked) -> list[bool]:
        """Whether the store says that it holds blocks; reads none."""
        names = self.names(asked, asked.kinds[0])
        answers = self.store.backend.exists_many(names, self._call(asked, names))
        return [answer is Presence.PRESENT for answer in answers]

    def _call(self, asked: Asked, names: Sequence[bytes]) -> Call:
        call = Call.within(_BATCH_S)
        if Capability.PACKS in self.store.backend.capabilities and asked.start >= 0:
            call.run = Run(asked.start, names)
        return call

    def _read(self, asked: Asked, names: Sequence[bytes], part: range, found: list[Resting]) -> None:
        received: dict[int, Resting] = {}

        def receive(k: int, view: memoryview) -> None:
            received[k] = self._verified(view, names[part[k]])

        some = [names[i] for i in part]
        statuses = self.store.backend.get_many(some, receive, self._call(asked, names))
        for k, status in enumerate(statuses):
            if k in received:
                found[part[k]] = received[k]
            elif status not in (ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.SKIPPED):
                cause = _NO_ANSWER.get(status, Cause.TIER_DOWN)
                found[part[k]] = Resting(cause, f"the medium answered {status.value}: kvstore doctor looks at it")

    def _verified(self, view: memoryview, name: bytes) -> Resting:
        try:
            head = self._checked(view, name)
        except CorruptRecordError as e:
            detail = f"{e}: readers drop it; kvstore verify --drop-corrupt does now"
            return Resting(_CAUSES.get(e.reason, Cause.CORRUPT), detail, nbytes=view.nbytes)
        return Resting(
            Cause.PRESENT,
            written=head.created,
            used=self.uses.get(name, 0.0),
            nbytes=view.nbytes,
            codec=self.store.codec_name(head.codec_id),
            parent=head.parent if head.parent_known and any(head.parent) else None,
            position=head.block_index if head.parent_known else -1,
        )

    def _checked(self, view: memoryview, name: bytes) -> Head:
        head = check(view, name[17:], self.keys)
        if head.namespace != self.namespace:
            raise CorruptRecordError("key", f"belongs to namespace {head.namespace.hex()}")
        if head.fingerprint != self.fingerprint:
            raise CorruptRecordError("spec", "made for another block spec")
        return head

    def _list_uses(self, names: Sequence[bytes]) -> None:
        """Find when records were last used, where listing them is cheap."""
        backend = self.store.backend
        if Capability.SCAN not in backend.capabilities or Capability.PACKS in backend.capabilities:
            return
        wanted = frozenset(names)
        for count, info in enumerate(backend.scan()):
            if count >= _MOST_LISTED:
                break
            if info.last_use:
                self.oldest_use = min(self.oldest_use or info.last_use, info.last_use)
            if info.name in wanted:
                self.uses[info.name] = info.last_use

    def empty(self) -> bool:
        """Whether the store holds no record at all, where it counts them exactly."""
        return Capability.PACKS not in self.store.backend.capabilities and self.store.backend.usage().records == 0

    def fullness(self, now: float) -> str:
        """What a full store says about records that left it; empty for others."""
        usage = self.store.backend.usage()
        if not usage.capacity_bytes or usage.payload_bytes < _FULL_SHARE * usage.capacity_bytes:
            return ""
        said = f"the tier is full ({size(usage.capacity_bytes)})"
        return said + (f", its oldest record was used {age(now - self.oldest_use)} ago" if self.oldest_use else "")


def infer(found: Sequence[Resting], full: str, *, empty: bool = False) -> list[Resting]:
    """Say what the neighbours of absent blocks tell about them.

    Args:
        found: Blocks of one prompt in one store, in order.
        full: As :meth:`Look.fullness` returns.
        empty: The store holds no record at all.
    """
    last = max((i for i, one in enumerate(found) if one is not ABSENT), default=-1)
    told = f"; {full}" if full else ""
    inferred = []
    for i, one in enumerate(found):
        if one is not ABSENT:
            inferred.append(one)
        elif i < last:
            text = f"blocks behind it are there, so it was evicted, dropped or deleted{told}: raise the tier's capacity"
            inferred.append(replace(one, cause=Cause.VANISHED, detail=text))
        elif last >= 0:
            text = f"nothing of the prompt from here on: it was never stored, or evicted, which takes tails first{told}"
            inferred.append(replace(one, detail=text))
        elif empty:
            inferred.append(replace(one, detail="the tier is empty: nothing was stored, or all of it was cleared"))
        else:
            what = "nothing of this prompt is here" if len(found) > 1 else "it is not here"
            text = f"{what}: check token ids, salt, adapter and group{told}"
            inferred.append(replace(one, detail=text))
    return inferred
