"""Judge a closed LMDB file from outside: walk every tree page before liblmdb may follow them.

liblmdb trusts the links inside its file; a damaged page ends in a wild read (SIGBUS, SIGSEGV) or
an internal abort.  This walk checks what liblmdb relies on: page numbers, page kinds, node
bounds, key order, tree depth, entry counts, overflow extents, and that no page is used twice or
is both used and free.  Payload bytes are not read; the records carry their own checksums.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

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
_NODE = struct.Struct("<HHHH")  # low and high half of size or child, flags, key size
_INTEGER_KEY: Final = 0x08
_MAX_DEPTH: Final = 32  # CURSOR_STACK in mdb.c


class UndecidedError(Exception):
    """The walk ran out of its time; the file is neither sound nor damaged."""


@dataclass(frozen=True, slots=True)
class _Node:
    """One leaf node: ``size`` is the value's length, ``at`` where it starts in the page."""

    key: bytes
    flags: int
    size: int
    at: int


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
        free = self._meta.free
        for page, node in self._leaves(free, integer_keys=True):
            self._take_free(self._value(page, node, free))
        return named

    def _walk_main(self) -> list[bytes]:
        names: list[bytes] = []
        main = self._meta.main
        for page, node in self._leaves(main):
            if not node.flags & F_SUBDATA:
                self._value(page, node, main)
                continue
            if node.size != TREE_BYTES:
                raise DamagedError(f"named tree {node.key!r} is described by {node.size} bytes")
            names.append(node.key)
            tree = Tree.parse(page, node.at)
            overflow = sum(self._extent(inner, leaf, tree) for inner, leaf in self._leaves(tree))
            if overflow != tree.overflow_pages:
                raise DamagedError(f"tree {node.key!r} has {overflow} overflow pages, claims {tree.overflow_pages}")
        return names

    def _leaves(self, tree: Tree, *, integer_keys: bool = False) -> Iterator[tuple[bytes, _Node]]:
        """Yield every leaf node of a tree in key order, with its page."""
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
            nodes = self._nodes(page, step, leaf=leaf, integer_keys=integer_keys)
            if not leaf:
                branches += 1
                stack.extend(reversed(self._children(nodes, step)))
                continue
            leaves += 1
            entries += len(nodes)
            for node in nodes:
                yield page, node
        if (entries, branches, leaves) != (tree.entries, tree.branch_pages, tree.leaf_pages):
            raise DamagedError(f"a tree holds {entries} entries on {leaves} leaves, claims {tree.entries}")

    def _page(self, pgno: int, kind: int) -> bytes:
        self._visited += 1
        if self._visited % 64 == 0 and time.monotonic() > self._end:
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

    def _nodes(self, page: bytes, step: _Step, *, leaf: bool, integer_keys: bool) -> list[_Node]:
        _, _, _, lower, upper = _PAGE.unpack_from(page)
        count = (lower - PAGE_HEADER_BYTES) // 2
        if count < 1 + (not leaf):
            raise DamagedError(f"page {step.pgno} has {count} nodes")
        nodes: list[_Node] = []
        previous = None
        taken = upper
        for i, at in enumerate(struct.unpack_from(f"<{count}H", page, PAGE_HEADER_BYTES)):
            if not upper <= at <= len(page) - _NODE.size:
                raise DamagedError(f"page {step.pgno} points outside itself")
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            value_at = at + _NODE.size + key_bytes
            size = low | high << 16 if leaf else low | high << 16 | flags << 32
            inline = (8 if flags & F_BIGDATA else size) if leaf else 0
            if value_at + inline > len(page) or (leaf and flags not in {0, F_BIGDATA, F_SUBDATA}):
                raise DamagedError(f"a node of page {step.pgno} leaves the page or has flags {flags:#x}")
            taken += (_NODE.size + key_bytes + inline + 1) & ~1
            key = page[at + _NODE.size : value_at]
            if integer_keys:
                key = self._integer(key, first_of_branch=not leaf and i == 0)
            if (leaf or i) and ((previous is not None and key <= previous) or not self._within(key, step)):
                raise DamagedError(f"keys of page {step.pgno} are out of order")
            previous = key if leaf or i else None
            nodes.append(_Node(key, flags, size, value_at))
        if taken != len(page):
            raise DamagedError(f"nodes of page {step.pgno} overlap or leave gaps")
        return nodes

    @staticmethod
    def _integer(key: bytes, *, first_of_branch: bool) -> bytes:
        """Turn a little-endian integer key into one that compares as bytes do."""
        if len(key) != 8 and not first_of_branch:
            raise DamagedError(f"a free-page key has {len(key)} bytes")
        return key[::-1]

    @staticmethod
    def _within(key: bytes, step: _Step) -> bool:
        return key >= step.low and (step.high is None or key < step.high)

    @staticmethod
    def _children(nodes: list[_Node], step: _Step) -> list[_Step]:
        lows = [step.low, *(node.key for node in nodes[1:])]
        highs = [*lows[1:], step.high]
        return [_Step(n.size, step.level + 1, lo, hi) for n, lo, hi in zip(nodes, lows, highs, strict=True)]

    def _extent(self, page: bytes, node: _Node, tree: Tree) -> int:
        """Check a node's overflow extent; return its pages, 0 for an inline value."""
        if not node.flags & F_BIGDATA:
            return 0
        if tree.overflow_pages == 0:
            raise DamagedError("a tree without overflow pages links to one")
        (pgno,) = struct.unpack_from("<Q", page, node.at)
        pages = (PAGE_HEADER_BYTES - 1 + node.size) // self._meta.page_bytes + 1
        self._take(pgno, pages)
        head = os.pread(self._fd, _EXTENT.size, pgno * self._meta.page_bytes)
        if len(head) < _EXTENT.size:
            raise DamagedError(f"overflow page {pgno} lies beyond the end of the file")
        number, _, flags, claimed = _EXTENT.unpack(head)
        if number != pgno or flags != P_OVERFLOW or claimed < pages:
            raise DamagedError(f"overflow page {pgno} has number {number}, flags {flags:#x}, {claimed} pages")
        if claimed > pages:  # a shorter value was written over a longer one
            self._take(pgno + pages, claimed - pages)
        return int(claimed)

    def _value(self, page: bytes, node: _Node, tree: Tree) -> bytes:
        if not node.flags & F_BIGDATA:
            return page[node.at : node.at + node.size]
        self._extent(page, node, tree)
        (pgno,) = struct.unpack_from("<Q", page, node.at)
        return os.pread(self._fd, node.size, pgno * self._meta.page_bytes + PAGE_HEADER_BYTES)

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
