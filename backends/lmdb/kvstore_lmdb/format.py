"""The LMDB 0.9 file format as far as a reader needs it to judge a file, without liblmdb.

Layouts follow the public header comments of LMDB 0.9 (``mdb.c``) on a 64-bit little-endian
machine.  Everything is read with ``pread``, never through a mapping: a file that lost its end
must not kill the process.
"""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import dataclass
from typing import Final

MAGIC: Final = 0xBEEFC0DE
DATA_VERSION: Final = 1
PAGE_HEADER_BYTES: Final = 16
P_BRANCH, P_LEAF, P_OVERFLOW, P_META = 0x01, 0x02, 0x04, 0x08
F_BIGDATA, F_SUBDATA = 0x01, 0x02
MAX_MAP_BYTES: Final = 1 << 44  # 16 TiB; the address space of a process is 128 TiB
NO_PAGE: Final = (1 << 64) - 1

SUPPORTED: Final = sys.byteorder == "little" and struct.calcsize("P") == 8

_META = struct.Struct("<IIQQ")  # magic, version, map address, map size; after the page header
_TREE = struct.Struct("<IHHQQQQQ")  # pad (page size in the first tree of a meta page), flags, depth, counts, root
_TAIL = struct.Struct("<QQ")  # last page, transaction id
META_BYTES: Final = PAGE_HEADER_BYTES + _META.size + 2 * _TREE.size + _TAIL.size


class DamagedError(Exception):
    """The file breaks a rule of the format; the text says which page and how."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One B-tree: its root page and what it claims to hold."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def parse(cls, data: bytes, offset: int = 0) -> Tree:
        """Read a tree record of 48 bytes."""
        _, flags, depth, branch, leaf, overflow, entries, root = _TREE.unpack_from(data, offset)
        return cls(flags, depth, branch, leaf, overflow, entries, root)


TREE_BYTES: Final = _TREE.size


@dataclass(frozen=True, slots=True)
class Meta:
    """The newer of the two meta pages.

    Attributes:
        page_bytes: Page size of the file.
        map_bytes: Largest map any process has opened it with.
        free: Tree of free pages.
        main: Unnamed tree, which holds the named ones.
        last_page: Highest page number in use.
        txnid: Last committed transaction.
    """

    page_bytes: int
    map_bytes: int
    free: Tree
    main: Tree
    last_page: int
    txnid: int

    @property
    def file_bytes(self) -> int:
        """Bytes that the file must have at least."""
        return (self.last_page + 1) * self.page_bytes


def _parse_meta(page: bytes, number: int) -> Meta:
    if len(page) < META_BYTES:
        raise DamagedError(f"meta page {number} is cut off after {len(page)} bytes")
    pgno, _, flags = struct.unpack_from("<QHH", page)
    magic, version, _, map_bytes = _META.unpack_from(page, PAGE_HEADER_BYTES)
    if pgno != number or flags != P_META or magic != MAGIC or version != DATA_VERSION:
        raise DamagedError(f"meta page {number} has page number {pgno}, flags {flags:#x}, magic {magic:#x}, v{version}")
    trees = PAGE_HEADER_BYTES + _META.size
    page_bytes: int = struct.unpack_from("<I", page, trees)[0]
    if page_bytes not in {4096, 8192, 16384, 32768}:
        raise DamagedError(f"meta page {number} claims pages of {page_bytes} bytes")
    last_page, txnid = _TAIL.unpack_from(page, trees + 2 * TREE_BYTES)
    if map_bytes > MAX_MAP_BYTES:
        raise DamagedError(f"meta page {number} claims a map of {map_bytes} bytes")
    if last_page < 1 or (last_page + 1) * page_bytes > max(map_bytes, 1 << 20):
        raise DamagedError(f"meta page {number} claims {last_page + 1} pages in a map of {map_bytes} bytes")
    free, main = Tree.parse(page, trees), Tree.parse(page, trees + TREE_BYTES)
    return Meta(page_bytes, map_bytes, free, main, last_page, txnid)


def read_meta(fd: int) -> Meta:
    """Read both meta pages and return the one that LMDB would use.

    Raises:
        DamagedError: Either page is unusable, or the two contradict each other.
        OSError: Reading failed.
    """
    first = _parse_meta(os.pread(fd, META_BYTES, 0), 0)
    second = _parse_meta(os.pread(fd, META_BYTES, first.page_bytes), 1)
    if first.page_bytes != second.page_bytes:
        raise DamagedError(f"meta pages disagree on the page size: {first.page_bytes} and {second.page_bytes}")
    return first if first.txnid > second.txnid else second
