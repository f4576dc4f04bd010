"""Which resident blocks lost the block before them."""

from __future__ import annotations

from kvstore.l1.entry import Entry


class Lineage:
    """Counts orphans: resident blocks whose parent left L1 before them.

    No prefix walk reaches an orphan in L1, so its bytes are wasted until the parent comes back; the
    count says how well a policy keeps prefixes whole.  A parent that leaves behind children is
    remembered until it is back or its last child is gone; a block whose parent was never here, such
    as the suffix of a prefix that lies in L2, is no orphan.

    Every operation is O(1); memory is bounded by the number of resident blocks.
    Not thread-safe, the owner of ``index`` locks.

    Args:
        index: Digest to entry of every resident block.  :meth:`added` and :meth:`removed` are
            called right after the index changed.
    """

    __slots__ = ("_absent", "_index", "_left", "orphans")

    def __init__(self, index: dict[bytes, Entry]) -> None:
        self._index = index
        self._absent: dict[bytes, int] = {}  # parent that is not resident -> its resident children
        self._left: set[bytes] = set()  # those of them that were resident once
        self.orphans = 0

    def added(self, entry: Entry) -> None:
        """Note that ``entry`` became resident."""
        entry.children = self._absent.pop(entry.digest, 0)
        if entry.children and entry.digest in self._left:
            self._left.discard(entry.digest)
            self.orphans -= entry.children
        if entry.parent is None:
            return
        parent = self._index.get(entry.parent)
        if parent is not None:
            parent.children += 1
            return
        self._absent[entry.parent] = self._absent.get(entry.parent, 0) + 1
        if entry.parent in self._left:
            self.orphans += 1

    def removed(self, entry: Entry) -> None:
        """Note that ``entry`` left L1, whatever the reason."""
        if entry.children:
            self._absent[entry.digest] = entry.children
            self._left.add(entry.digest)
            self.orphans += entry.children
            entry.children = 0
        if entry.parent is None:
            return
        parent = self._index.get(entry.parent)
        if parent is not None:
            parent.children -= 1
            return
        if entry.parent in self._left:
            self.orphans -= 1
        left = self._absent[entry.parent] - 1
        if left:
            self._absent[entry.parent] = left
        else:
            del self._absent[entry.parent]
            self._left.discard(entry.parent)

    def clear(self) -> None:
        """Forget everything; the index is empty."""
        self._absent.clear()
        self._left.clear()
        self.orphans = 0
