"""Looking at what a tier holds without changing anything: no counter of hits, no recency, nothing dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.l2.border import READING
from kvstore.l2.part import Part
from kvstore.l2.receiver import Receiver
from kvstore.types import BlockStatus, Call, Presence, ReadStatus

if TYPE_CHECKING:
    from kvstore.blocks import OpenBlock
    from kvstore.keys import KVCacheKey
    from kvstore.l2.tier import Tier
    from kvstore.opening import OpenTier

T = TypeVar("T")

READ_BYTES: Final = 64 << 20
"""Blocks of a tier that one look verifies, in raw bytes: 0.3 s of a bucket at 200 MB/s."""

_OF_PRESENCE: Final = {
    Presence.PRESENT: BlockStatus.DELIVERED,
    Presence.ABSENT: BlockStatus.ABSENT,
    Presence.UNKNOWN: BlockStatus.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Found:
    """What a tier holds of one block.

    Attributes:
        status: DELIVERED when it is there and, if it was read, sound.
        read: Whether its record was read; otherwise the tier only said whether it is there.
        reason: Which check a record failed first.
    """

    status: BlockStatus
    read: bool = False
    reason: str = ""


class Inspection:
    """One look at the blocks of a key in one tier; bounded by its deadline and by :data:`READ_BYTES`.

    Records are read like any others, by the tier's threads where it has some, and verified; a damaged
    one stays where it is.

    Args:
        open_tier: Where to look; not suspended.
        key: Which blocks.
        call: Limits.
    """

    def __init__(self, open_tier: OpenTier, key: KVCacheKey, call: Call) -> None:
        self._tier: Tier = open_tier.tier
        self._shelf = open_tier.reader.shelf
        self._key = key
        self._call = call

    def look(self) -> list[Found]:
        """Ask for all blocks, then read those that are said to be there, from the first one on."""
        said = self._tier.presence(Part.rest(self._key), self._call)
        found = [Found(_OF_PRESENCE[presence]) for presence in said]
        most = max(1, READ_BYTES // self._shelf.shape.block_bytes)
        there = [i for i, presence in enumerate(said) if presence is Presence.PRESENT][:most]
        for i, one in zip(there, self._read(there), strict=True):
            found[i] = one
        if self._tier.asks_by_reading:  # whole objects travel and may be damaged on their way, see TierReader
            bad = [i for i in there if found[i].reason]
            for i, one in zip(bad, self._read(bad), strict=True):
                found[i] = one
        return found

    def _read(self, indices: Sequence[int]) -> list[Found]:
        if not indices:
            return []
        part = Part(self._key, indices)
        call = Call(self._call.deadline)
        names = self._ask("epoch", lambda: self._tier.names_of(part, call), call)
        if names is None:
            return self._unread(len(indices))
        receiver = Receiver(self._shelf, names, part.digests, _look_at, call)
        said = self._ask(READING, lambda: self._tier.read(names, receiver.receive, call), call)
        receiver.finish()
        if said is None:
            said = [ReadStatus.TIMEOUT if call.stop() else ReadStatus.UNAVAILABLE] * len(names)
        found = []
        for k, answer in enumerate(said):
            bad = receiver.bad.get(k)
            reason = "" if bad is None or k in receiver.delivered else bad.error.reason
            found.append(Found(receiver.status(k, answer), read=True, reason=reason))
        return found

    def _unread(self, blocks: int) -> list[Found]:
        return [Found(BlockStatus.TIMEOUT if self._call.stop() else BlockStatus.UNAVAILABLE)] * blocks

    def _ask(self, operation: str, work: Callable[[], T], call: Call) -> T | None:
        tier = self._tier
        return tier.guarded(operation, work if tier.direct else lambda: tier.in_worker(work, call))


def _look_at(i: int, block: OpenBlock) -> None:
    """A verified block is all that is wanted."""
