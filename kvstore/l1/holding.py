"""What a lease or reservation holds, and how it comes back when nobody gives it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.l1.entry import Entry

Held = Entry | int
"""A pinned entry, or the number of a slot that is not published yet."""

RELEASED: Final = -1
"""Given back on purpose."""
ABANDONED: Final = -2
"""Dropped without release, and nothing looks at its memory."""

Dropped = deque["tuple[Holding, int]"]


class Holding:
    """Pins or slots of one lease or reservation, given back exactly once.

    :meth:`drop` only appends to a deque, so it may run in a finalizer, which the garbage collector
    starts at any allocation, also inside L1's lock.  L1 drains the deque at its next call, and
    ``items`` changes only there, under its lock; so each item is given back once, whatever
    finalizers and explicit releases overlap.

    Attributes:
        items: What is held; None where it has been given back.
        live: Items not given back yet.
    """

    __slots__ = ("_dropped", "items", "live")

    def __init__(self, items: Sequence[Held], dropped: Dropped) -> None:
        self.items: list[Held | None] = list(items)
        self.live = len(self.items)
        self._dropped = dropped

    def drop(self, index: int) -> None:
        """Announce the end of one item, or of all with ``RELEASED`` or ``ABANDONED``; never blocks."""
        if self.live:
            self._dropped.append((self, index))

    def take(self, index: int) -> list[Held]:
        """Take out one item, or all of them; what was taken before is left out."""
        chosen = range(len(self.items)) if index in (RELEASED, ABANDONED) else (index,)
        taken: list[Held] = []
        for i in chosen:
            held = self.items[i]
            if held is not None:
                self.items[i] = None
                taken.append(held)
        self.live -= len(taken)
        return taken
