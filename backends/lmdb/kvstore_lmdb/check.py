"""Judge a closed LMDB file from outside: walk every tree page before liblmdb may follow them.

liblmdb trusts the links inside its file; a damaged page ends in a wild read (SIGBUS, SIGSEGV) or
an internal abort.  This walk checks what liblmdb relies on: page numbers, page kinds, node
bounds, key order, tree depth, entry counts, overflow extents, and that no page is used twice or
is both used and free.  Payload bytes are not read; the records carry their own checksums.
"""

from __future__ import annotations

import itertools
import operator
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore_lmdb.format import (
    F_BIGDATA,
    F_SUBDATA,
    NO_PAGE,
    P_BRANCH,
    P_LEAF,
    P_OVERFLOW,
    PAGE_HEADER_BYTES,
    TREE_BYTES,
    DamagedError,
    Meta,
    Tree,
)

_PAGE = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_EXTENT = struct.Struct("<QHHI")  # page number, pad, flags, pages
_PGNO = struct.Struct("<Q")
_NODE_BYTES: Final = 8  # low and high half of size or child, flags, key size: two bytes each
_INTEGER_KEY: Final = 0x08
_MAX_DEPTH: Final = 32  # CURSOR_STACK in mdb.c

Numbers = npt.NDArray[np.int64]


class UndecidedError(Exception):
    """The walk ran out of its time; the file is neither sound nor damaged."""


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of one page, one item of each column a node.

    ``sizes`` are value lengths on a leaf and child pages on a branch; ``ats`` where values start.
    """

    page: bytes
    keys: list[bytes]
    flags: Numbers
    sizes: Numbers
    ats: Numbers

    def value(self, i: int) -> bytes:
        """Return an inline value."""
        at = int(self.ats[i])
        return self.page[at : at + int(self.sizes[i])]


@dataclass(frozen=True, slots=True)
class _Step:
    """A page to visit and the half-open key range ``[low, high)`` that its parent promises."""

    pgno: int
    level: int
    low: bytes
    high: bytes | None


class FileCheck:
    """One walk over one file; single use, single thread."""

    def __init__(self, fd: int, meta: Meta, budget_s: float) -> None:
        self._fd: Final = fd
        self._meta: Final = meta
        self._end: Final = time.monotonic() + budget_s
        self._used: Final = bytearray(meta.last_page + 1)
        self._used[0:2] = b"\1\1"
        self._visited = 0

    def run(self) -> list[bytes]:
        """Walk the file; return the names of its named trees.

        Raises:
            DamagedError: A rule is broken.
            UndecidedError: The budget is spent.
            OSError: Reading failed.
        """
        named = self._walk_main()
        for nodes in self._leaves(self._meta.free, integer_keys=True):
            for i, extent in enumerate(self._extents(nodes)):
                self._take_free(self._read(extent, int(nodes.sizes[i])) if extent else nodes.value(i))
        return named

    def _walk_main(self) -> list[bytes]:
        names: list[bytes] = []
        for nodes in self._leaves(self._meta.main):
            self._extents(nodes)
            for i, name in enumerate(nodes.keys):
                if not nodes.flags[i] & F_SUBDATA:
                    continue
                if nodes.sizes[i] != TREE_BYTES:
                    raise DamagedError(f"named tree {name!r} is described by {nodes.sizes[i]} bytes")
                names.append(name)
                self._walk_named(name, Tree.parse(nodes.value(i)))
        return names

    def _walk_named(self, name: bytes, tree: Tree) -> None:
        overflow = sum(extent[1] for nodes in self._leaves(tree) for extent in self._extents(nodes) if extent)
        if overflow != tree.overflow_pages:
            raise DamagedError(f"tree {name!r} has {overflow} overflow pages, claims {tree.overflow_pages}")

    def _leaves(self, tree: Tree, *, integer_keys: bool = False) -> Iterator[_Nodes]:
        """Yield the nodes of every leaf page of a tree in key order."""
        unsupported = tree.flags & (0x02 | 0x04 | 0x10 | 0x20 | 0x40 | (0 if integer_keys else _INTEGER_KEY))
        if unsupported:
            raise DamagedError(f"a tree has flags {tree.flags:#x}, which kvstore never sets")
        if tree.root == NO_PAGE:
            if tree.entries or tree.depth:
                raise DamagedError(f"a tree without a root claims {tree.entries} entries")
            return
        if not 1 <= tree.depth <= _MAX_DEPTH:
            raise DamagedError(f"a tree claims a depth of {tree.depth}")
        entries = branches = leaves = 0
        stack = [_Step(tree.root, 1, b"", None)]
        while stack:
            step = stack.pop()
            leaf = step.level == tree.depth
            page = self._page(step.pgno, P_LEAF if leaf else P_BRANCH)
            nodes = _parse(page, step, leaf=leaf, integer_keys=integer_keys)
            if not leaf:
                branches += 1
                stack.extend(reversed(_children(nodes, step)))
                continue
            leaves += 1
            entries += len(nodes.keys)
            yield nodes
        if (entries, branches, leaves) != (tree.entries, tree.branch_pages, tree.leaf_pages):
            raise DamagedError(f"a tree holds {entries} entries on {leaves} leaves, claims {tree.entries}")

    def _page(self, pgno: int, kind: int) -> bytes:
        self._visited += 1
        if self._visited % 16 == 0 and time.monotonic() > self._end:
            raise UndecidedError
        self._take(pgno, 1)
        page_bytes = self._meta.page_bytes
        page = os.pread(self._fd, page_bytes, pgno * page_bytes)
        if len(page) < page_bytes:
            raise DamagedError(f"page {pgno} lies beyond the end of the file")
        number, _, flags, lower, upper = _PAGE.unpack_from(page)
        if number != pgno or flags != kind or not PAGE_HEADER_BYTES <= lower <= upper <= page_bytes or lower % 2:
            raise DamagedError(f"page {pgno} has number {number}, flags {flags:#x}, bounds {lower} and {upper}")
        return page

    def _extents(self, nodes: _Nodes) -> list[tuple[int, int] | None]:
        """Check the overflow extents of a leaf: first page and pages; None for an inline value."""
        found: list[tuple[int, int] | None] = [None] * len(nodes.keys)
        big = np.flatnonzero(nodes.flags & F_BIGDATA)
        needed = (PAGE_HEADER_BYTES - 1 + nodes.sizes[big]) // self._meta.page_bytes + 1
        for i, at, pages in zip(big.tolist(), nodes.ats[big].tolist(), needed.tolist(), strict=True):
            (pgno,) = _PGNO.unpack_from(nodes.page, at)
            self._take(pgno, pages)
            head = os.pread(self._fd, _EXTENT.size, pgno * self._meta.page_bytes)
            if len(head) < _EXTENT.size:
                raise DamagedError(f"overflow page {pgno} lies beyond the end of the file")
            number, _, flags, claimed = _EXTENT.unpack(head)
            if number != pgno or flags != P_OVERFLOW or claimed < pages:
                raise DamagedError(f"overflow page {pgno} has number {number}, flags {flags:#x}, {claimed} pages")
            if claimed > pages:  # a shorter value was written over a longer one
                self._take(pgno + pages, claimed - pages)
            found[i] = (pgno, claimed)
        return found

    def _read(self, extent: tuple[int, int], nbytes: int) -> bytes:
        return os.pread(self._fd, nbytes, extent[0] * self._meta.page_bytes + PAGE_HEADER_BYTES)

    def _take(self, pgno: int, pages: int) -> None:
        if not (pgno >= 2 and pages >= 1 and pgno + pages <= len(self._used)):
            raise DamagedError(f"pages {pgno} to {pgno + pages - 1} lie outside the file's {len(self._used)} pages")
        if self._used.find(1, pgno, pgno + pages) >= 0:
            raise DamagedError(f"one of the pages {pgno} to {pgno + pages - 1} is used twice or is free as well")
        self._used[pgno : pgno + pages] = b"\1" * pages

    def _take_free(self, listed: bytes) -> None:
        """Check one list of free pages: a count, then page numbers in descending order."""
        if len(listed) < 8 or len(listed) % 8:
            raise DamagedError(f"a list of free pages has {len(listed)} bytes")
        (count,) = struct.unpack_from("<Q", listed)
        if count > len(listed) // 8 - 1:
            raise DamagedError(f"a list of free pages claims {count} entries in {len(listed)} bytes")
        previous = len(self._used)
        for pgno in struct.unpack_from(f"<{count}Q", listed, 8):
            if pgno >= previous:
                raise DamagedError("a list of free pages is not in descending order")
            self._take(pgno, 1)
            previous = pgno


def _parse(page: bytes, step: _Step, *, leaf: bool, integer_keys: bool) -> _Nodes:
    """Take a page apart, checking all that liblmdb would follow; columns at once, for speed."""
    _, _, _, lower, upper = _PAGE.unpack_from(page)
    count = (lower - PAGE_HEADER_BYTES) // 2
    if count < 1 + (not leaf):
        raise DamagedError(f"page {step.pgno} has {count} nodes")
    words = np.frombuffer(page, "<u2")
    starts = words[PAGE_HEADER_BYTES // 2 :][:count].astype(np.int64)
    if (starts % 2).any() or starts.min() < upper or starts.max() > len(page) - _NODE_BYTES:
        raise DamagedError(f"page {step.pgno} points outside itself")
    low, high, flags, key_bytes = (words[starts // 2 + i].astype(np.int64) for i in range(4))
    ats = starts + _NODE_BYTES + key_bytes
    sizes = low | high << 16
    inline = np.where(flags & F_BIGDATA, 8, sizes) if leaf else np.zeros_like(sizes)
    if (ats + inline).max() > len(page) or (leaf and flags.max() > F_SUBDATA):  # neither others nor both
        raise DamagedError(f"a node of page {step.pgno} leaves the page or has unknown flags")
    if upper + int(((_NODE_BYTES + key_bytes + inline + 1) & ~1).sum()) != len(page):
        raise DamagedError(f"nodes of page {step.pgno} overlap or leave gaps")
    keys = [page[start + _NODE_BYTES : at] for start, at in zip(starts.tolist(), ats.tolist(), strict=True)]
    if integer_keys:
        keys = [_integer(key, first_of_branch=not leaf and i == 0) for i, key in enumerate(keys)]
    ordered = keys if leaf else keys[1:]  # the first key of a branch is never looked at
    inside = ordered[0] >= step.low and (step.high is None or ordered[-1] < step.high)
    if not inside or not all(map(operator.lt, ordered, itertools.islice(ordered, 1, None))):
        raise DamagedError(f"keys of page {step.pgno} are out of order")
    return _Nodes(page, keys, flags, sizes if leaf else sizes | flags << 32, ats)


def _integer(key: bytes, *, first_of_branch: bool) -> bytes:
    """Turn a little-endian integer key into one that compares as bytes do."""
    if len(key) != 8 and not first_of_branch:
        raise DamagedError(f"a free-page key has {len(key)} bytes")
    return key[::-1]


def _children(nodes: _Nodes, step: _Step) -> list[_Step]:
    lows = [step.low, *nodes.keys[1:]]
    highs = [*lows[1:], step.high]
    return [
        _Step(child, step.level + 1, low, high)
        for child, low, high in zip(nodes.sizes.tolist(), lows, highs, strict=True)
    ]
