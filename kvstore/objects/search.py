"""Where the stored part of a sequence ends: a search with a fixed number of questions a round.

Names are chained digests, so a block's presence says that all before it were stored.  That makes
"is it there?" monotone along the sequence, and a round of k questions leaves one of k + 1 parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvstore.objects.cuts import cut, group_of
from kvstore.objects.plan import Positions
from kvstore.types import Presence


class LeadingSearch:
    """The search for one call: ask :meth:`ends`, answer by :meth:`learn`, until nothing is asked.

    First the ends of whole groups, where a stored group always has an object; in the same round
    the ends that a last, incomplete group would have.  Then every end inside the group in which
    the stored part stops.  2,048 blocks in packs of 16 take at most three rounds of 16 questions.

    Args:
        names: Names of the run, in the order of their positions.
        positions: Where they are in their run.
        questions: Objects to ask for in one round, at least 2.
    """

    def __init__(self, names: Sequence[bytes], positions: Positions, questions: int) -> None:
        self._positions = positions
        self._at = [positions.of(name) or 0 for name in names]
        self._first = self._at[0]
        self._pack_blocks = blocks = positions.pack_blocks
        self._start = group_of(self._first, blocks)[0]
        last_group = group_of(self._at[-1], blocks)[0]
        whole = last_group + blocks <= positions.stop
        self._groups = (last_group - self._start) // blocks + whole  # those whose end the run reaches
        self._tail = [] if whole else [b - 1 for _, b in cut(last_group, positions.stop, blocks)]
        self._questions = max(2, questions - len(self._tail))
        self._below = -1  # groups up to this one are stored
        self._above = self._groups  # this one is not, or not all of it
        self._held: set[int] = set()
        self._asked: set[int] = set()
        self._doubt = positions.stop  # from here on something could not be asked for

    def ends(self) -> list[bytes]:
        """The objects to ask for in the next round; empty when the answer is known."""
        unknown = self._above - self._below - 1
        if unknown:
            k = min(unknown, self._questions)
            wanted: Sequence[int] = [self._end_of(self._below - (-(j + 1) * unknown // k)) for j in range(k)]
            if not self._asked:
                wanted = [*wanted, *self._tail]
        elif not self._asked:
            wanted = self._tail
        else:
            wanted = self._inside()
        fresh = [p for p in wanted if p >= self._positions.start and p not in self._asked]
        self._asked.update(fresh)
        return [self._positions.name(p) for p in fresh]

    def _end_of(self, group: int) -> int:
        return self._start + (group + 1) * self._pack_blocks - 1

    def _inside(self) -> Sequence[int]:
        """Every end in the group where the stored part stops, unless that group is known whole."""
        start = self._end_of(self._above) - self._pack_blocks + 1
        stop = min(start + self._pack_blocks, self._positions.stop)
        begin = max(start, self._first)
        return () if self._held.issuperset(range(begin, stop)) else range(begin, stop)

    def learn(self, found: Mapping[bytes, int], failed: Collection[bytes], asked: Sequence[bytes]) -> None:
        """Take the answers of a round: blocks of each object that is there, names not asked for."""
        present: list[int] = []
        for end in asked:
            position = self._positions.of(end)
            if position is None:
                continue
            blocks = found.get(end, 0)
            self._held.update(range(position - blocks + 1, position + 1))
            if end in failed:
                self._doubt = min(self._doubt, position - self._pack_blocks + 1)
            group, left = divmod(position + 1 - self._start, self._pack_blocks)
            if left or group > self._groups:
                continue
            if blocks:
                present.append(group - 1)
            else:
                self._above = min(self._above, group - 1)
        self._below = max([self._below, *(g for g in present if g < self._above)])
        self._below = min(self._below, self._above - 1)

    @property
    def stop(self) -> int:
        """Position of the first block that is not stored, as far as the answers tell."""
        position = max(self._first, self._end_of(self._above) - self._pack_blocks + 1)
        while position in self._held:
            position += 1
        return position

    @property
    def next_name(self) -> bytes | None:
        """Name at :attr:`stop`; None when everything asked for is stored or that could not be asked."""
        stop = self.stop
        return self._positions.name(stop) if self._doubt > stop <= self._at[-1] else None

    def hold(self, names: Sequence[bytes]) -> None:
        """These names are stored, which the search did not find out."""
        self._held.update(p for name in names if (p := self._positions.of(name)) is not None)

    def answers(self) -> list[Presence]:
        """Presence of each name."""
        stop = self.stop
        doubt = max(stop, self._doubt)
        return [Presence.PRESENT if p < stop else Presence.UNKNOWN if p >= doubt else Presence.ABSENT for p in self._at]

    def proven_absent(self) -> list[bytes]:
        """Names just behind the stored part, of whose absence the answers leave no doubt."""
        stop = self.stop
        group_stop = min(group_of(stop, self._pack_blocks)[1], self._positions.stop)
        return [] if self._doubt <= stop else [self._positions.name(p) for p in range(stop, group_stop)]
