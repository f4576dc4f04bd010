"""What a process knows about the medium without asking: where names lie, and which are not there."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.objects.naming import key_of
from kvstore.objects.pack import Entry

_HOLES: Final = 4096  # names that were missed inside or at the end of a run; each costs the next lookup one look

_REMOVED: Final = 4096  # ends whose removal is remembered; each costs a look at the medium at worst

_OVERLAP_S: Final = 5.0
"""For how long after a removal an observation may be older than it: no operation takes longer, by its deadline."""

_LISTED: Final = 1 << 15
"""Names of a listing whose place is remembered, 8 MB: whoever lists reads or removes what was listed last."""


@dataclass(slots=True, eq=False)
class StoredObject:
    """One object as it was last seen.

    Attributes:
        end: Name it is stored under: that of its last record.
        blocks: Records inside.
        nbytes: Its length; 0 when not known.
        modified: Unix time of its creation or refresh; 0.0 when not known.
        seen: ``time.monotonic()`` of the last proof that it is there.
        gone: It was found missing or removed; whatever still points here is void.
        written: By this process, which counted it then.
        names: Those that were noted to be in it.
        entries: Its index, when that was read to ask for parts of it.
    """

    end: bytes
    blocks: int
    nbytes: int = 0
    modified: float = 0.0
    seen: float = 0.0
    gone: bool = False
    written: bool = False
    names: tuple[bytes, ...] = ()
    entries: Sequence[Entry] | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """Names of one sequence, all stored when the last of them was seen."""

    until: float


class Remembered:
    """Bounded memory of names; every verdict ends with the event that contradicts it.  Thread-safe.

    Where a name lies is a hint without an age, because a read finds out.  That a name is there, or
    is not, is believed for a limited time only.
    """

    def __init__(self, names: int, positive_ttl_s: float, negative_ttl_s: float) -> None:
        self._most = names
        self._positive_ttl_s = positive_ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._lock = threading.Lock()
        self._objects: OrderedDict[bytes, StoredObject] = OrderedDict()  # name to the object that holds it
        self._listed: OrderedDict[bytes, StoredObject] = OrderedDict()  # the same, from a listing
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()  # name to a run that was seen to be stored
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # name to the end of the verdict
        self._holes: OrderedDict[bytes, None] = OrderedDict()  # names missed where their sequence says otherwise
        self._removed: OrderedDict[bytes, float] = OrderedDict()  # end of an object to when it was found to be gone

    def where(self, name: bytes) -> StoredObject | None:
        """The object that held the name when it was last seen."""
        found = self._objects.get(name) or self._listed.get(name)
        return None if found is None or found.gone else found

    def present(self, name: bytes, *, leading: bool = False) -> bool:
        """Whether the name was seen recently enough to say so, or with ``leading`` a later one of its sequence."""
        now = time.monotonic()
        found = self._objects.get(name)
        if found is not None and not found.gone and now - found.seen < self._positive_ttl_s:
            return True
        run = self._runs.get(name) if leading else None
        return run is not None and now < run.until

    def absent(self, name: bytes) -> bool:
        """Whether the name was missing a moment ago."""
        end = self._absent.get(name)
        return end is not None and time.monotonic() < end

    def note(self, names: Sequence[bytes], seen: StoredObject, began: float = -math.inf) -> None:
        """These names are in that object.

        Where another thread removed an object of that name meanwhile, only where it was is remembered,
        not that it is there.

        Args:
            names: What it holds.
            seen: The object.
            began: ``time.monotonic()`` when whoever saw or wrote it began, if known.
        """
        now = time.monotonic()
        with self._lock:
            removed = self._removed.get(seen.end, -math.inf)
            seen.seen = -math.inf if began <= removed and now - removed < _OVERLAP_S else now
            known = self._objects.get(seen.end)
            seen.written = seen.written or (known is not None and known.written and known.end == seen.end)
            seen.names = tuple(dict.fromkeys((*seen.names, *names))) if seen.names else tuple(names)
            for name in names:
                self._objects.pop(name, None)  # to the recent end
                self._objects[name] = seen
                self._absent.pop(name, None)
                self._holes.pop(name, None)
            _trim(self._objects, self._most)

    def note_listed(self, listed: StoredObject, names: Sequence[bytes]) -> None:
        """A listing came across an object that holds these names; what readers know stays as it is."""
        listed.seen = time.monotonic()
        listed.names = tuple(names)
        with self._lock:
            self._listed.update(dict.fromkeys(names, listed))
            _trim(self._listed, _LISTED)

    def note_run(self, names: Sequence[bytes]) -> None:
        """These names of one sequence are stored, because what follows them is."""
        if self._positive_ttl_s <= 0.0:
            return
        run = _Run(time.monotonic() + self._positive_ttl_s)
        with self._lock:
            for name in names:
                self._runs.pop(name, None)
                self._runs[name] = run
            _trim(self._runs, self._most)

    def doubt(self, names: Iterable[bytes]) -> None:
        """These names could not be had: the runs they belong to are not all there."""
        for name in names:
            run = self._runs.get(name)
            if run is not None:
                run.until = 0.0

    def note_holes(self, names: Iterable[bytes]) -> None:
        """These names are missing although what follows them may be there: only a look at each says more."""
        with self._lock:
            self.doubt(names)
            self._holes.update(dict.fromkeys(names))
            _trim(self._holes, _HOLES)

    def hole(self, name: bytes) -> bool:
        """Whether the name was missing, whatever its sequence says."""
        return name in self._holes

    def objects(self) -> dict[str, StoredObject]:
        """Every remembered object by its key."""
        with self._lock:
            return {key_of(there.end): there for there in {*self._objects.values(), *self._listed.values()}}

    def note_absent(self, names: Sequence[bytes]) -> None:
        """These names are in no object that this sequence could find."""
        if self._negative_ttl_s <= 0.0:
            return
        end = time.monotonic() + self._negative_ttl_s
        with self._lock:
            for name in names:
                known = self._objects.get(name)
                if known is not None and not known.gone:
                    continue  # put meanwhile
                self._absent.pop(name, None)
                self._absent[name] = end
            _trim(self._absent, self._most)

    def lost(self, end: bytes, before: float = math.inf, *, replaced: bool = False) -> list[bytes]:
        """The object of that name is not there (any more); returns the names remembered to be in it.

        Args:
            end: Its name.
            before: ``time.monotonic()``; what was seen later is another object of that name.
            replaced: There is a new one of that name, which is noted next.
        """
        with self._lock:
            if not replaced:
                self._removed.pop(end, None)
                self._removed[end] = time.monotonic()
                _trim(self._removed, _REMOVED)
            lost: dict[bytes, None] = {}
            for table in (self._objects, self._listed):
                known = table.get(end)
                # the name may lie in another object, which this says nothing about
                if known is None or known.end != end or known.seen >= before:
                    continue
                known.gone = True
                for name in known.names:
                    if table.get(name) is known:
                        del table[name]
                        lost[name] = None
            self.doubt([end, *lost])
            return list(lost)

    def forget(self, names: Iterable[bytes]) -> None:
        """Nothing is known about these names."""
        with self._lock:
            for name in names:
                self._objects.pop(name, None)
                self._listed.pop(name, None)
                self._absent.pop(name, None)
                self.doubt([name])


def _trim(table: OrderedDict[bytes, Any], most: int) -> None:
    while len(table) > most:
        table.popitem(last=False)
