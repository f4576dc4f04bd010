"""What the object engine can be told by a backend that builds on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.errors import ConfigError

MAX_PACK_BLOCKS: Final = 256
"""Largest pack: its index still fits one small read, and reading one block wastes at most that much."""

MAX_PACK_BYTES: Final = 32 << 20
"""Bytes of one pack at most, so that a reader's thread holds and a failed request loses no more."""

PACKED_BLOCK_BYTES: Final = 4 << 20
"""Blocks of this size and more get an object each: one request is a small part of moving them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """How the engine treats one medium.

    Attributes:
        pack_blocks: Blocks of one pack at most, a power of two up to 256; 1 switches packs off.
        threads: Requests in flight at once for one call, besides none of the caller's own; also
            the number of keys asked for in one round of a search.
        positive_ttl_s: How long a name may be called present from memory.
        negative_ttl_s: How long it may be called absent from memory, by reads too; own puts end it at once.
        remembered_names: Names whose object is remembered, about 200 bytes each.
        epoch_age_s: How old a cached epoch may be, so how late a ``clear`` elsewhere is noticed.
        request_s: Limit of one operation that has no caller's deadline, such as a refresh.
        refresh_after_s: Age past which a used object is made young again; None for never.
        evicts: Keep within the capacity, and make room on a full medium, by removing old objects.
        survey_interval_s: Seconds between listings of the whole medium; 0.0 lists only for an
            eviction and once when the tier has a capacity.
        charge_bytes: Each object's length is rounded up to a multiple of this when it is charged.
    """

    pack_blocks: int = 16
    threads: int = 16
    positive_ttl_s: float = 30.0
    negative_ttl_s: float = 2.0
    remembered_names: int = 100_000
    epoch_age_s: float = 1.0
    request_s: float = 5.0
    refresh_after_s: float | None = None
    evicts: bool = False
    survey_interval_s: float = 0.0
    charge_bytes: int = 1

    def __post_init__(self) -> None:
        blocks = self.pack_blocks
        if not 1 <= blocks <= MAX_PACK_BLOCKS or blocks & (blocks - 1):
            msg = f"pack is {blocks}; expected a power of two from 1 (no packs) to {MAX_PACK_BLOCKS}"
            raise ConfigError(msg)
        if self.threads < 1:
            msg = f"threads is {self.threads}; expected 1 or more"
            raise ConfigError(msg)

    def pack_blocks_for(self, block_bytes: int) -> int:
        """Blocks of a pack for blocks of that many raw bytes; every process gets the same answer."""
        if block_bytes >= PACKED_BLOCK_BYTES:
            return 1
        blocks = self.pack_blocks
        while blocks > 1 and blocks * block_bytes > MAX_PACK_BYTES:
            blocks //= 2
        return blocks
