"""Which names are stored: few requests for a long sequence, whatever its length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.errors import BackendError
from kvstore.objects.plan import Ask, Plan, Positions
from kvstore.objects.remembered import StoredObject
from kvstore.objects.search import LeadingSearch
from kvstore.objects.store import ObjectStore
from kvstore.types import Call, Presence

_AHEAD: Final = 4
"""Rounds of questions sent at once when only the leading names count and nothing better is known."""


@dataclass(slots=True)
class Looked:
    """Answers of one round.

    Attributes:
        found: Sound objects by the name they are stored under.
        failed: Names whose object could not be asked for.
        error: What the first of them failed with; None when only the time was up.
    """

    found: dict[bytes, StoredObject] = field(default_factory=dict)
    failed: set[bytes] = field(default_factory=set)
    error: BackendError | None = None


class Finder:
    """The lookup side of one store; thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Presence of each name: from memory, by a search along the run, or by looking at each."""
        remembered = self._store.remembered
        answers: list[Presence | None] = [
            Presence.PRESENT
            if remembered.present(n, leading=call.leading_only)
            else Presence.ABSENT
            if remembered.absent(n)
            else None
            for n in names
        ]
        if call.leading_only:
            stop = next((i for i, a in enumerate(answers) if a is Presence.ABSENT), len(names))
            answers[stop:] = [Presence.ABSENT] * (len(names) - stop)
        open_ = [i for i, a in enumerate(answers) if a is None]
        if open_:
            asked = [names[i] for i in open_]
            found = self._leading(asked, call) if call.leading_only else self._each(asked, call)
            for i, presence in zip(open_, found, strict=True):
                answers[i] = presence
        return [a or Presence.UNKNOWN for a in answers]

    def _each(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Look for every name; holes are found wherever they are."""
        located = self.locate(names, call)
        absent = [name for name in names if name not in located.found and name not in located.failed]
        self._store.remembered.note_absent(absent)
        return [
            Presence.PRESENT
            if name in located.found
            else Presence.UNKNOWN
            if name in located.failed
            else Presence.ABSENT
            for name in names
        ]

    def _leading(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """Look for the end of the leading run of names: first at those that were missed before, then by a search."""
        holes = [name for name in names if self._store.remembered.hole(name)]
        if not holes:
            return self._search(names, call)
        located = self.locate(holes, call)
        hole = next((name for name in holes if name not in located.found), None)
        if hole is None:
            return self._search(names, call)
        stop = names.index(hole)
        known = self._search(names[:stop], call) if stop else []
        end = Presence.UNKNOWN if hole in located.failed else Presence.ABSENT
        return known + [end] * (len(names) - stop)

    def _search(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        positions = Positions(call.run, self._store.pack_blocks)
        at = [positions.of(name) for name in names]
        if None in at or any(b is not None and a is not None and b <= a for a, b in itertools.pairwise(at)):
            return self._each(names, call)
        search = LeadingSearch(names, positions, self._store.settings.threads)
        while ends := search.ends():
            looked = self.look(ends, call)
            for end, there in looked.found.items():
                self._store.remembered.note(positions.held_by(end, there.blocks), there)
            search.learn({end: there.blocks for end, there in looked.found.items()}, looked.failed, ends)
        self._follow_hints(search, call)
        self._store.remembered.note_absent(search.proven_absent())
        answers = search.answers()
        self._store.remembered.note_run(names[: answers.count(Presence.PRESENT)])  # they come first
        return answers

    def _follow_hints(self, search: LeadingSearch, call: Call) -> None:
        """Go on where the run ends inside a pack that was seen before and that the run cannot name."""
        tried: set[bytes] = set()
        while (name := search.next_name) is not None:
            known = self._store.remembered.where(name)
            if known is None or known.end in tried:
                return
            tried.add(known.end)
            names = known.names
            there = self.look([known.end], call).found.get(known.end)
            if there is None or there.blocks != known.blocks:
                return
            self._store.remembered.note(names, there)
            search.hold(names)

    def locate(self, names: Sequence[bytes], call: Call) -> Looked:
        """Find the object that holds each name, by name; ``failed`` are names that one might hold.

        With ``call.leading_only`` it stops soon after the first name that is not there.
        """
        positions = Positions(call.run, self._store.pack_blocks)
        plan = Plan(names, positions, self._store.remembered)
        located = Looked()
        asks = self._look_for(plan.first(), positions, located, call)
        while asks:
            missing = [i for i, name in enumerate(names) if name not in located.found]
            asks = self._look_for(plan.rest(missing), positions, located, call)
        return located

    def _look_for(self, asks: Sequence[Ask], positions: Positions, located: Looked, call: Call) -> bool:
        """Look at the objects of one round; False when it was empty, or told that the rest is not wanted."""
        step = _AHEAD * self._store.settings.threads if call.leading_only else max(1, len(asks))
        for k in range(0, len(asks), step):
            part = asks[k : k + step]
            looked = self.look([ask.end for ask in part], call)
            for there in looked.found.values():
                held = self._held_by(there, positions)
                self._store.remembered.note(held, there)
                located.found.update(dict.fromkeys(held, there))
            located.failed |= self._doubtful(looked.failed, positions)
            located.error = located.error or looked.error
            if call.leading_only and any(ask.decides >= 0 and ask.end not in looked.found for ask in part):
                return positions.stop > positions.start
        return bool(asks)

    def _held_by(self, there: StoredObject, positions: Positions) -> list[bytes]:
        """Names in an object, as the run tells, or as it was seen before."""
        held = positions.held_by(there.end, there.blocks)
        known = self._store.remembered.where(there.end) if len(held) < there.blocks else None
        if known is None or known.end != there.end or (known.blocks, known.nbytes) != (there.blocks, there.nbytes):
            return held
        return list(dict.fromkeys((*held, *known.names)))

    def _doubtful(self, ends: Iterable[bytes], positions: Positions) -> set[bytes]:
        """Names that an object which could not be asked for may hold."""
        doubtful: set[bytes] = set()
        for end in ends:
            doubtful.update(positions.held_by(end, positions.pack_blocks))
        return doubtful

    def look(self, ends: Sequence[bytes], call: Call) -> Looked:
        """Look at several objects at once; stops waiting at the call's deadline."""
        looked = Looked()
        open_ = set(ends)

        def one(end: bytes) -> None:
            if call.stop():
                return
            try:
                there = self._store.look(end, call)
            except BackendError as e:
                looked.error = looked.error or e
                return
            open_.discard(end)
            if there is None:
                self._store.lost(end)
            else:
                looked.found[end] = there

        self._store.fanout.each(one, ends, until=call.deadline)
        return Looked(dict(looked.found), set(open_), looked.error)  # late answers must not change it
