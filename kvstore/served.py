"""What one read call got from which source."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.tensors import Rows

L1: Final = "l1"
"""L1's name among the sources of a call."""


class Served:
    """Which source delivered which blocks of one call; belongs to the calling thread.

    Attributes:
        key: The blocks that were asked for; every index below counts from its first one.
        rows: Where the delivered blocks lie by now, None when they went into L1 only.
        corrupt: For each tier by name, the blocks whose copy there failed verification, whether
            or not another source delivered them.
        silent: Tiers by name that did not answer; they are not asked again in this call.
        cancelled: Set when the caller wants no more than what there is by then.
    """

    def __init__(self, key: KVCacheKey, rows: Rows | None = None) -> None:
        self.key = key
        self.rows = rows
        self.corrupt: dict[str, set[int]] = {}
        self.silent: set[str] = set()
        self.cancelled = threading.Event()
        self._asked: dict[str, Sequence[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._stops: dict[str, int] = {}
        self._gated: dict[str, set[int]] = {}

    def note(self, source: str, start: int, run: int) -> None:
        """``source`` was asked for the blocks from ``start`` on and delivered the first ``run``."""
        self._asked.setdefault(source, range(start, len(self.key)))
        self._blocks.setdefault(source, []).extend(range(start, start + run))
        self._stops[source] = start + run

    def note_gated(self, source: str, blocks: Iterable[int]) -> None:
        """``source`` was not really asked for these blocks, because computing them is faster."""
        self._gated.setdefault(source, set()).update(blocks)

    def gated(self, source: str) -> int:
        """How many blocks ``source`` was not really asked for."""
        return len(self._gated.get(source, frozenset()).difference(self.blocks(source)))

    def useless(self, source: str, start: int) -> bool:
        """Whether asking ``source`` for the blocks from ``start`` on was in vain already in this call."""
        return source in self.silent or self._stops.get(source) == start

    def note_each(self, source: str, asked: Sequence[int], got: Sequence[int]) -> None:
        """``source`` was asked for some blocks and delivered ``got``."""
        self._asked[source] = asked
        self._blocks[source] = list(got)

    def note_corrupt(self, source: str, blocks: Sequence[int]) -> None:
        """The copies that ``source`` held of these blocks failed verification."""
        if blocks:
            self.corrupt.setdefault(source, set()).update(blocks)

    def absorb(self, part: Served, start: int, kept: int) -> None:
        """Note what a prefix call for ``key[start:...]`` found, of which the first ``kept`` blocks were delivered."""
        for source, asked in part._asked.items():
            self._asked.setdefault(source, range(start + len(part.key) - len(asked), len(self.key)))
        self._absorb(part, start, [i for i in part.every() if i < kept])

    def absorb_each(self, part: Served, start: int, kept: Sequence[int]) -> None:
        """Note what a call for the independent blocks ``key[start:...]`` found, of which ``kept`` were delivered."""
        for source, asked in part._asked.items():
            self._asked[source] = [*self.asked_of(source), *(start + i for i in asked)]
        self._absorb(part, start, kept)

    def _absorb(self, part: Served, start: int, kept: Sequence[int]) -> None:
        delivered = frozenset(kept)
        for source in part._asked:
            got = [start + i for i in part.blocks(source) if i in delivered]
            self._blocks.setdefault(source, []).extend(got)
            self.note_corrupt(source, [start + i for i in part.corrupt.get(source, ())])
            if source in part._gated:
                self.note_gated(source, (start + i for i in part._gated[source]))

    def asked_of(self, source: str) -> Sequence[int]:
        """Indices of the blocks that ``source`` was asked for."""
        return self._asked.get(source, ())

    def blocks(self, source: str) -> list[int]:
        """Indices of the blocks that ``source`` delivered, ascending."""
        return self._blocks.get(source, [])

    def every(self) -> list[int]:
        """Indices of all delivered blocks, ascending."""
        return sorted(i for blocks in self._blocks.values() for i in blocks)

    @property
    def total(self) -> int:
        """Blocks delivered."""
        return sum(len(blocks) for blocks in self._blocks.values())
