"""One namespace of a store that takes records, in the order and the portions that its medium likes."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.backend import Capability, PutHint, PutItem
from kvstore.cli.archive import Parcel, Refused
from kvstore.cli.records import check
from kvstore.errors import CorruptRecordError
from kvstore.l2.names import name_prefix
from kvstore.types import WRITE_PRIORITY, Call, Presence, PutStatus

if TYPE_CHECKING:
    from kvstore.cli.store import Store

_BATCH_S: Final = 60.0  # nobody waits for an answer here; only a medium that hangs must end
_TOUCHED_TOGETHER: Final = 256
_RECENT_BYTES: Final = 64 << 20  # a few packs of the largest blocks that are packed
_PAGE_BYTES: Final = 4096  # media round records up to pages, or nearly so
_FILLED: Final = 0.95  # of the capacity: then the newest records begin to push out the first ones
_ZEROS: Final = bytes(32)


@dataclass(slots=True)
class Arrivals:
    """What became of the records that came.

    Attributes:
        counts: ``stored``, ``existing`` (the store had them), ``left_out`` (no room) and the
            statuses of puts that failed, such as ``unavailable``.
        refused: What was no sound record, with the reason.
        documents: Descriptions that were kept, and ``unverified`` ones that were not.
        nbytes: Bytes of the stored records.
        statuses: What became of each by its name; None when nobody asks for that.
    """

    counts: Counter[str] = field(default_factory=Counter)
    refused: list[Refused] = field(default_factory=list)
    documents: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    statuses: dict[bytes, PutStatus] | None = None

    def note(self, item: PutItem, status: PutStatus) -> None:
        """Count one record."""
        self.counts["existing" if status is PutStatus.EXISTS else status.value] += 1
        self.nbytes += item.nbytes if status is PutStatus.STORED else 0
        if self.statuses is not None:
            self.statuses[item.name] = status


class Lane:
    """Puts the records of one namespace, which come parents first, one branch after the other.

    Media that pack find a block through packs of its own sequence, so where a sequence leaves another
    one inside a pack, the blocks that they share go into a pack of each.

    Args:
        store: Opened for writing, for this namespace.
        namespace: 16-byte digest.
        arrivals: Where to count.
    """

    def __init__(self, store: Store, namespace: bytes, arrivals: Arrivals) -> None:
        self._backend = store.backend
        self.namespace = namespace
        self._arrivals = arrivals
        self._prefix = name_prefix(namespace, self._backend.epoch(namespace))
        self._shape = self._backend.batch_shape()
        self._packs = Capability.PACKS in self._backend.capabilities and self._shape.align > 1
        self._waiting: list[PutItem] = []
        self._waiting_bytes = 0
        self._again: set[bytes] = set()  # names that wait a second time, to be packed with others
        self._recent: OrderedDict[bytes, PutItem] = OrderedDict()
        self._recent_bytes = 0
        self._names: list[bytes] = []
        capacity_bytes = self._backend.usage().capacity_bytes
        self._room_bytes = int(_FILLED * capacity_bytes) if capacity_bytes else None

    def add(self, parcel: Parcel) -> None:
        """Take a record; it is stored with others, as many as the medium likes at once."""
        if not self._fits(len(parcel.data)):
            self._arrivals.counts["left_out"] += 1
            return
        item = self._item(parcel)
        if self._packs:
            self._begin_run(item)
        self._append(item)
        self._names.append(item.name)
        align = self._shape.align
        ends = align > 1 and (item.hint.position + 1) % align == 0
        if ends or len(self._waiting) >= self._shape.blocks or self._waiting_bytes >= self._shape.nbytes:
            self._put()

    def _item(self, parcel: Parcel) -> PutItem:
        head, prefix = parcel.head, self._prefix + bytes([parcel.kind])
        position = head.block_index if head.parent_known else -1
        parent = prefix + head.parent if head.parent_known and head.parent != _ZEROS else b""
        hint = PutHint(parent, position)
        return PutItem(prefix + head.digest, [memoryview(parcel.data)], hint, head.head_bytes)

    def _append(self, item: PutItem) -> None:
        self._waiting.append(item)
        self._waiting_bytes += item.nbytes

    def _fits(self, nbytes: int) -> bool:
        """Whether the record leaves those before it where they are, the more useful ones."""
        if self._room_bytes is None:
            return True
        self._room_bytes -= (nbytes // _PAGE_BYTES + 2) * _PAGE_BYTES
        return self._room_bytes >= 0

    # -- packs

    def _begin_run(self, item: PutItem) -> None:
        """Where another run begins: put the one before it, then fetch the start of the new run's pack."""
        parent, position = item.hint.parent, item.hint.position
        if not self._waiting or self._waiting[-1].name != parent:
            if self._waiting:
                self._put()
            for before in self._before(parent, position % self._shape.align if position > 0 else 0):
                self._again.add(before.name)
                self._append(before)
        self._remember(item)

    def _before(self, name: bytes, count: int) -> list[PutItem]:
        """The records that lead to a name, the name's own last; as many as are there without a hole."""
        found: list[PutItem] = []
        while len(found) < count and name:
            item = self._recent.get(name) or self._read_back(name)
            if item is None:
                break
            found.append(item)
            name = item.hint.parent
        return found[::-1]

    def _read_back(self, name: bytes) -> PutItem | None:
        """A record that came a while ago or was there before, from where it lies."""
        found: list[PutItem] = []

        def receive(_: int, view: memoryview) -> None:
            with contextlib.suppress(CorruptRecordError):
                head = check(view, name[17:])
                if head.namespace == self.namespace:
                    found.append(self._item(Parcel(name[16], head, bytes(view))))

        self._backend.get_many([name], receive, Call.within(_BATCH_S))
        return found[0] if found else None

    def _remember(self, item: PutItem) -> None:
        self._recent[item.name] = item
        self._recent_bytes += item.nbytes
        while self._recent_bytes > _RECENT_BYTES:
            _, oldest = self._recent.popitem(last=False)
            self._recent_bytes -= oldest.nbytes

    # -- storing

    def _put(self) -> None:
        items, self._waiting, self._waiting_bytes = self._waiting, [], 0
        again, self._again = self._again, set()
        call = Call.within(_BATCH_S, priority=WRITE_PRIORITY)
        # tail first: later items of a call are the more valuable ones on a medium that evicts
        absent = self._absent(items, call)[::-1]
        statuses = self._backend.put_many(absent, call) if absent else []
        for item, status in zip(absent, statuses, strict=True):
            if item.name not in again:
                self._arrivals.note(item, status)

    def _absent(self, items: list[PutItem], call: Call) -> list[PutItem]:
        if Capability.CONDITIONAL_PUT in self._backend.capabilities:
            return items
        found = self._backend.exists_many([item.name for item in items], call)
        absent = []
        for item, presence in zip(items, found, strict=True):
            if presence is Presence.PRESENT:
                self._arrivals.note(item, PutStatus.EXISTS)
            else:
                absent.append(item)
        return absent

    def finish(self) -> None:
        """Store what waits, then make heads younger than their tails, so that tails are evicted first."""
        if self._waiting:
            self._put()
        tail_first = self._names[::-1]
        for start in range(0, len(tail_first), _TOUCHED_TOGETHER):
            self._backend.touch_many(tail_first[start : start + _TOUCHED_TOGETHER])
            self._backend.maintain()
