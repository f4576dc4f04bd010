"""What L1 knows about one block."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a block stands: what a record needs to know besides digest and parent.

    Attributes:
        kind: Kind of the key.
        group: KV group.
        position: Absolute block index, -1 when unknown.
    """

    kind: int
    group: int
    position: int


class Entry:
    """One resident block; changed only under the lock of its :class:`~kvstore.l1.cache.L1Cache`.

    Whoever pinned an entry may read its slot's bytes until the pin is given back, also when the
    entry was deleted meanwhile.  Pinned bytes never change.

    Attributes:
        digest: The block's 32-byte digest.
        slot: Its slot in the pool.
        pins: Holders (leases, copies under way, queued writes); above 0 the block is not evicted.
        parent: Digest of the block before it; None for a first block.
        children: Resident blocks whose parent this block is.
        stored: Bitmask of L2 tiers known to hold the block; kept by the core.
        pending: Bitmask of L2 tiers with a queued write of it; kept by the core.
        place: Where it stands in its sequence; kept by the core, which needs it to write a block that
            is about to leave, None when it does not.
        dead: No longer in the index; the slot goes back at the last unpin.
    """

    __slots__ = ("children", "dead", "digest", "parent", "pending", "pins", "place", "slot", "stored")

    def __init__(self, digest: bytes, slot: int, parent: bytes | None) -> None:
        self.digest = digest
        self.slot = slot
        self.pins = 0
        self.parent = parent
        self.children = 0
        self.stored = 0
        self.pending = 0
        self.place: Place | None = None
        self.dead = False

    def __repr__(self) -> str:
        state = "dead" if self.dead else "resident"
        return f"Entry({self.digest.hex()[:12]}, slot={self.slot}, pins={self.pins}, {state})"
