"""Which objects to ask for the names of a call, in at most two rounds."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kvstore.objects.cuts import cut, ends_for, group_of
from kvstore.objects.remembered import Remembered
from kvstore.types import Run


class Positions:
    """Absolute positions of the names of a run, as far as packs may be searched by them."""

    def __init__(self, run: Run | None, pack_blocks: int) -> None:
        names: Sequence[bytes] = run.names if run is not None else ()
        self.start = run.start if run is not None else 0
        self.stop = self.start + len(names)
        self.pack_blocks = pack_blocks
        self._names = names
        self._of = {name: self.start + k for k, name in enumerate(names)}

    def of(self, name: bytes) -> int | None:
        """Position of a name; None when the run does not have it."""
        return self._of.get(name)

    def name(self, position: int) -> bytes:
        """Name at a position inside the run."""
        return self._names[position - self.start]

    def held_by(self, end: bytes, blocks: int) -> list[bytes]:
        """Names of the run that an object of so many blocks under that name holds, in order."""
        last = self._of.get(end)
        if last is None:
            return [end]
        first = max(self.start, last - blocks + 1)
        return [self.name(p) for p in range(first, last + 1)]

    def likely_end(self, position: int) -> int:
        """Where the pack of a block ends if its sequence was stored in one go.

        The block at that end has no other place: were it in a larger pack, that would end at the
        same position or beyond the run.  So the object's absence is the block's.
        """
        start, stop = group_of(position, self.pack_blocks)
        if stop <= self.stop:
            return stop - 1
        return next(end - 1 for _, end in cut(start, self.stop, self.pack_blocks) if end > position)


@dataclass(frozen=True, slots=True)
class Ask:
    """One object to look for.

    Attributes:
        end: The name it would be stored under.
        first: Lowest index, in the call's names, of what it may hold.
        decides: Index of the first name that is certainly not stored when the object is absent;
            -1 when its absence proves nothing.
    """

    end: bytes
    first: int
    decides: int = -1


class Plan:
    """The objects to ask for one call; not thread-safe, it is used between the rounds."""

    def __init__(self, names: Sequence[bytes], positions: Positions, remembered: Remembered) -> None:
        self._names = names
        self.positions = positions
        self._remembered = remembered
        self._asked: set[bytes] = set()

    def first(self, skip: Container[int] = ()) -> list[Ask]:
        """The objects that hold the names if they were stored in the usual way, in the order of the names.

        Args:
            skip: Indices of names that nothing is asked for.
        """
        asks: list[Ask] = []
        ends: set[int] = set()
        for i, name in enumerate(self._names):
            if i in skip:
                continue
            known = self._remembered.where(name)
            if known is not None:
                self._add(asks, Ask(known.end, i))
                continue
            position = self.positions.of(name)
            if position is None:
                self._add(asks, Ask(name, i, i))
                continue
            end = self.positions.likely_end(position)
            if end not in ends:
                ends.add(end)
                self._add(asks, Ask(self.positions.name(end), i, self._index_at(i, end)))
        return asks

    def rest(self, missing: Iterable[int]) -> list[Ask]:
        """Every other object that may hold names that the first round did not find."""
        asks: list[Ask] = []
        for i in missing:
            position = self.positions.of(self._names[i])
            if position is None:
                self._add(asks, Ask(self._names[i], i))  # it was remembered elsewhere, wrongly
                continue
            for end in ends_for(position, self.positions.pack_blocks):
                if self.positions.start <= end < self.positions.stop:
                    self._add(asks, Ask(self.positions.name(end), i))
        return asks

    def _add(self, asks: list[Ask], ask: Ask) -> None:
        if ask.end not in self._asked:
            self._asked.add(ask.end)
            asks.append(ask)

    def _index_at(self, i: int, end: int) -> int:
        """Index of the first name from ``i`` on that lies at position ``end`` or behind it."""
        for k in range(i, len(self._names)):
            at = self.positions.of(self._names[k])
            if at is None or at >= end:
                return k
        return len(self._names)
