"""How a capacity is divided into an index, segment files and regions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvstore_lmdb.directory import regular_file, sync_directory

from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore_nvme.slot import PAGE_BYTES

FORMAT_VERSION: Final = 1
ANCHOR_NAME: Final = "kvstore.nvme"
MIN_REGION_BYTES: Final = 64 << 10
MAX_REGION_BYTES: Final = 1 << 30
FIXED_BYTES: Final = 192 << 10
"""Lock files, reader table, epochs and descriptions, generously."""

_LEAST: Final = 4 << 20  # usual region: a capacity / 64 within these two
_MOST: Final = 256 << 20
_FEW: Final = 8  # regions of a small store at least, where the block size allows it
_BLOCKS: Final = 16  # blocks in a region at least, so that taking one costs little a block ...
_SOME: Final = 16  # ... where that leaves so many regions
_UNKNOWN_BLOCK_BYTES: Final = 64 << 10
_LARGE_RECORD_BYTES: Final = (16 << 20) + 2 * PAGE_BYTES  # fits where the block size is not known, if there is room
_SEGMENT_BYTES: Final = 1 << 30
_SEGMENTS: Final = 64  # files at most, so that a store needs few descriptors
_INDEX_LEAST: Final = 1 << 20
_RECORD_INDEX_BYTES: Final = 600  # 250 bytes live a record; copy-on-write needs as much again, and slack
_MAX_ANCHOR_BYTES: Final = 4096
_MOST_REGIONS: Final = 1 << 32  # the index numbers regions by u32


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a store's files look like; fixed when the store is made.

    Attributes:
        region_bytes: Space of one region, a multiple of the page.
        segment_regions: Regions in one segment file.
    """

    region_bytes: int
    segment_regions: int

    @property
    def region_pages(self) -> int:
        """Pages of one region."""
        return self.region_bytes // PAGE_BYTES

    def place(self, region: int) -> tuple[int, int]:
        """Return the segment number and the byte offset of a region."""
        return region // self.segment_regions, region % self.segment_regions * self.region_bytes

    def within(self, region: int, lengths: Mapping[int, int]) -> bool:
        """Whether segment files of these lengths, by number, reach to the end of a region."""
        number, start = self.place(region)
        return lengths.get(number, 0) >= start + self.region_bytes


def slot_bytes(block_bytes: int) -> int:
    """Return the space of an uncompressed block: its page, its bytes, and token ids that spill over."""
    return PAGE_BYTES + -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def index_budget(capacity_bytes: int, block_bytes: int) -> int:
    """Return the bytes that the index may take of a capacity; half-compressed blocks are assumed."""
    stored = slot_bytes((block_bytes or _UNKNOWN_BLOCK_BYTES) // 2)
    wanted = capacity_bytes // stored * _RECORD_INDEX_BYTES
    size = max(_INDEX_LEAST, min(wanted, capacity_bytes // 8))
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def choose(capacity_bytes: int, block_bytes: int, region_bytes: int | None) -> Geometry:
    """Choose the geometry of a new store.

    Args:
        capacity_bytes: Space for everything.
        block_bytes: Raw bytes of a block; 0 when unknown.
        region_bytes: The option, None to choose.

    Raises:
        ConfigError: Not even two blocks fit.
    """
    room = capacity_bytes - index_budget(capacity_bytes, block_bytes) - FIXED_BYTES
    slot = slot_bytes(block_bytes) if block_bytes else MIN_REGION_BYTES
    if region_bytes is None:
        region_bytes = min(max(_LEAST, min(capacity_bytes // 64, _MOST)), room // _FEW)
        region_bytes = max(region_bytes, min(_BLOCKS * slot, room // _SOME))
        if not block_bytes and room // 3 >= _LARGE_RECORD_BYTES:
            region_bytes = max(region_bytes, _LARGE_RECORD_BYTES)
        region_bytes = max(MIN_REGION_BYTES, slot, region_bytes // slot * slot if block_bytes else region_bytes)
    region_bytes = region_bytes // PAGE_BYTES * PAGE_BYTES
    if not MIN_REGION_BYTES <= region_bytes <= MAX_REGION_BYTES or region_bytes < slot:
        raise ConfigError(
            f"backend 'nvme', option 'region_bytes': {region_bytes} bytes are not between "
            f"{max(MIN_REGION_BYTES, slot)} (one block) and {MAX_REGION_BYTES}"
        )
    if room < 2 * region_bytes:
        raise ConfigError(
            f"backend 'nvme', option 'capacity': {capacity_bytes} bytes do not hold two regions of {region_bytes} "
            f"bytes and the index; give it at least {capacity_bytes + 2 * region_bytes - room}"
        )
    segment = max(_SEGMENT_BYTES, capacity_bytes // _SEGMENTS)
    return Geometry(region_bytes, max(1, segment // region_bytes))


def count_regions(geometry: Geometry, capacity_bytes: int, index_bytes: int) -> int:
    """Return how many regions fit a capacity beside an index of that size."""
    return max(0, (capacity_bytes - index_bytes - FIXED_BYTES) // geometry.region_bytes)


def read_anchor(directory: Path) -> Geometry | None:
    """Read the file that makes a directory a store; None when there is none or it is damaged.

    Raises:
        BackendPermissionError: It is a symbolic link.
        BackendUnavailableError: A newer kvstore wrote it.
        OSError: It cannot be read.
    """
    path = directory / ANCHOR_NAME
    if regular_file(path) is None:
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        text = os.pread(fd, _MAX_ANCHOR_BYTES, 0)
    finally:
        os.close(fd)
    try:
        found = json.loads(text)
        version = found.pop("format")
        geometry = Geometry(**found)
        sound = type(geometry.region_bytes) is int and type(geometry.segment_regions) is int
        sound = sound and MIN_REGION_BYTES <= geometry.region_bytes <= MAX_REGION_BYTES
        sound = sound and 1 <= geometry.segment_regions <= _MOST_REGIONS and geometry.region_bytes % PAGE_BYTES == 0
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    if version != FORMAT_VERSION:
        raise BackendUnavailableError(
            f"{directory} has store format {version!r}, this kvstore reads {FORMAT_VERSION}; upgrade kvstore or "
            "name another directory"
        )
    return geometry if sound else None


def write_anchor(directory: Path, geometry: Geometry) -> None:
    """Write the file, one page long so that direct I/O can be tried on it, and bring it to the medium."""
    text = json.dumps({"format": FORMAT_VERSION, **asdict(geometry)}).encode().ljust(PAGE_BYTES - 1) + b"\n"
    fd = os.open(directory / ANCHOR_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask says
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(directory)
