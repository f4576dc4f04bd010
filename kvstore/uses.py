"""What a finished read means for the tiers: promotion upward, second uses, repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.l2.part import Part
from kvstore.l2.write_queue import Request
from kvstore.queueing import Copied, end_request, placed
from kvstore.served import L1
from kvstore.types import Presence

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.l1.entry import Entry
    from kvstore.served import Served
    from kvstore.stack import OpenTier, Stack


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one tier should get after a read; indices into the key, ascending.

    Attributes:
        open_tier: Who gets it.
        promote: Blocks that it takes and did not deliver.
        repair: Blocks whose copy there was damaged and that another source delivered.
        own: Digests of the blocks that it delivered.
    """

    open_tier: OpenTier
    promote: Sequence[int]
    repair: frozenset[int]
    own: frozenset[bytes]

    @property
    def blocks(self) -> list[int]:
        """All of them."""
        return sorted({*self.promote, *self.repair})


class Uses:
    """Moves blocks between tiers after reads; thread-safe.

    - A tier gets, if it takes them, the blocks that a slower one delivered; never those it
      delivered itself.
    - A tier for hot blocks gets those that were used a second time, whoever delivered them.
    - A tier whose copy was damaged gets a good one, whatever it takes otherwise.

    Blocks are queued from L1, where a read leaves what is likely to be read again.  Those that
    are not there are copied from the caller's memory for a repair, or when there is no L1.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def note(self, served: Served) -> None:
        """Queue what a finished read calls for; one set test when that is nothing."""
        if self._nothing_new(served):
            return
        stack, key = self._stack, served.key
        version = stack.settled.version
        hot = stack.second_uses([key.digests[i] for i in served.every()])
        wishes = self._wishes(served, hot)
        from_tiers = {i for t in stack.tiers for i in served.blocks(t.tier.name)} if stack.demotions else set()
        with _Pinned(stack, key, {i for wish in wishes for i in wish.blocks} | from_tiers) as held:
            if stack.demotions is not None:
                stack.demotions.place(key, list(held.items()))
            known = [self._grant(served, wish, held) for wish in wishes]
        settled = [wish_known for wish, wish_known in zip(wishes, known, strict=True) if wish.open_tier.admit == "hot"]
        if settled and len(settled) == len(stack.hot_tiers):
            stack.settled.note(list(frozenset.intersection(*settled)), version)

    def _nothing_new(self, served: Served) -> bool:
        stack, key = self._stack, served.key
        if served.corrupt or any(served.blocks(t.tier.name) for t in stack.tiers[1:]):
            return False
        if not stack.hot_tiers:
            return stack.demotions is None or not stack.tiers or not served.blocks(stack.tiers[0].tier.name)
        if stack.tiers and served.blocks(stack.tiers[0].tier.name):
            return False
        used = served.blocks(L1)
        return stack.settled.covers(key.digests if len(used) == len(key) else [key.digests[i] for i in used])

    def _wishes(self, served: Served, hot: set[bytes]) -> list[_Wish]:
        digests, every = served.key.digests, served.every()
        slower: list[int] = []  # delivered by a tier behind the one that is looked at
        wishes: list[_Wish] = []
        for open_tier in reversed(self._stack.tiers):
            own = frozenset(served.blocks(open_tier.tier.name))
            damaged: AbstractSet[int] = served.corrupt.get(open_tier.tier.name, set())
            repair = frozenset(damaged).intersection(every) - own
            promote: list[int] = []
            if open_tier.admit == "all":
                promote = sorted(i for i in slower if i not in repair)
            elif open_tier.admit == "hot":
                promote = [i for i in every if digests[i] in hot and i not in own and i not in repair]
            if promote or repair:
                wishes.append(_Wish(open_tier, promote, repair, frozenset(digests[i] for i in own)))
            slower += own
        return wishes

    def _grant(self, served: Served, wish: _Wish, held: Mapping[int, Entry]) -> frozenset[bytes]:
        """Queue what the tier lacks; returns what it is known to hold."""
        stack, key, open_tier = self._stack, served.key, wish.open_tier
        repair = {key.digests[i] for i in wish.repair}
        here = [(i, held[i]) for i in wish.blocks if i in held]
        with stack.marks:
            for i, entry in here:
                if i in wish.repair:
                    entry.stored &= ~open_tier.tier.bit
        todo, known, coming = stack.queueing.lacking(open_tier.tier, key, here)
        copied = self._copied(served, wish, held)
        open_tier.tier.touch(key.kind, [entry.digest for _, entry in here if entry.digest in known])
        if not todo and not copied:
            return frozenset(known)
        request = Request(key.kind)
        taken = stack.queueing.entries(open_tier, placed(key, todo), request, repair)
        if copied and served.rows is not None:
            source = Copied(key, served.rows, wish.repair)
            taken += stack.queueing.copies(open_tier, source, copied, request)
        end_request(open_tier, request, set(taken), known.union(coming, wish.own), key.digests)
        return frozenset(known)

    def _copied(self, served: Served, wish: _Wish, held: Mapping[int, Entry]) -> list[int]:
        """Blocks to be copied from the caller's memory, because they are not in L1."""
        if served.rows is None:
            return []
        missing = [i for i in wish.repair if i not in held]
        if self._stack.l1 is None:
            missing += self._absent(wish.open_tier, served.key, wish.promote)
        return sorted(missing)

    @staticmethod
    def _absent(open_tier: OpenTier, key: KVCacheKey, blocks: Sequence[int]) -> Sequence[int]:
        """Leave out what a look shows to be there, where looking is cheap: copying is not."""
        tier = open_tier.tier
        if not blocks or not tier.direct:
            return blocks
        found = tier.presence(Part(key, blocks), tier.call())
        return [i for i, presence in zip(blocks, found, strict=True) if presence is not Presence.PRESENT]


class _Pinned:
    """Blocks of a key that are in L1, pinned while a ``with`` block runs."""

    def __init__(self, stack: Stack, key: KVCacheKey, wanted: set[int]) -> None:
        self._l1 = stack.l1 if wanted else None
        self._key = key
        self._wanted = sorted(wanted)
        self._held: dict[int, Entry] = {}

    def __enter__(self) -> Mapping[int, Entry]:
        if self._l1 is not None:
            resident = self._l1.pin_each([self._key.digests[i] for i in self._wanted])
            self._held = {i: entry for i, entry in zip(self._wanted, resident, strict=True) if entry is not None}
        return self._held

    def __exit__(self, *_: object) -> None:
        if self._l1 is not None:
            self._l1.unpin(self._held.values())
