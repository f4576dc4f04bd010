"""What ``explain`` says: for each block and each tier, why a read finds it there or not."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any


class Cause(enum.Enum):
    """Why a tier delivers a block or does not; exactly one for each block and tier."""

    PRESENT = "present"
    """A read finds it there."""
    QUEUED = "queued"
    """It waits to be written, or is being written."""
    NOT_STORED = "not_stored"
    """As far as this process knows it was never written there, and no other namespace there has it."""
    NOT_ADMITTED = "not_admitted"
    """The tier takes hot or evicted blocks only, and this one is not yet."""
    QUEUE_FULL = "queue_full"
    """The write queue had no room when it was put."""
    REFUSED = "refused"
    """The medium, or L1 before it, did not take it."""
    DROPPED = "dropped"
    """Its queued write was given up."""
    EVICTED = "evicted"
    """It made room for others."""
    DELETED = "deleted"
    """Somebody called ``delete`` for it in this process."""
    CLEARED = "cleared"
    """Somebody cleared the namespace."""
    VANISHED = "vanished"
    """It was there, and somebody or something else than this process took it away."""
    CORRUPT = "corrupt"
    """Its record failed verification."""
    MISMATCH = "mismatch"
    """Under its name lies a sound record of something else."""
    UNAUTHENTICATED = "unauthenticated"
    """Its record was not made with the key that this cache asks for."""
    NAMESPACE_DIFFERS = "namespace_differs"
    """Another namespace there holds it; the detail names the fields with both values."""
    KEY_DIFFERS = "key_differs"
    """The same tokens are there under another salt, adapter or group; only ``kvstore explain`` can tell."""
    TIER_DOWN = "tier_down"
    """The tier fails, or is suspended because it kept failing."""
    NOT_OPENED = "not_opened"
    """The tier could not be opened; it is not required and is tried again."""
    NO_ANSWER = "no_answer"
    """The tier did not answer in time."""
    GATED = "gated"
    """It is there, but loading it takes longer than computing it."""
    BEHIND_A_HOLE = "behind_a_hole"
    """It is there, but a prefix read ends at a block before it."""
    L1_DISABLED = "l1_disabled"
    """There is no L1."""


HOLDING = frozenset({Cause.PRESENT, Cause.GATED, Cause.BEHIND_A_HOLE})
"""Causes that say that the block is in the tier."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """What became of one block in one tier.

    Attributes:
        tier: Name of the tier, ``"l1"`` for the cache in memory.
        cause: Why a read finds the block there or not.
        detail: One sentence: the circumstances and what to do.
        at: Unix time in seconds of what happened, as far as that is known.
    """

    tier: str
    cause: Cause
    detail: str
    at: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain text and numbers, ready for JSON."""
        return {"tier": self.tier, "cause": self.cause.value, "detail": self.detail, "at": self.at}


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Where one block of a key is, and where it is not.

    Attributes:
        index: Which block of the key, from 0.
        digest: Its 32 bytes.
        present: Whether it is in L1 or some tier, and sound as far as it was read.
        reachable: Whether a prefix read of the key delivers it.
        tiers: One report for L1 and each configured tier, in lookup order.
    """

    index: int
    digest: bytes
    present: bool
    reachable: bool
    tiers: tuple[TierReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain text and numbers, ready for JSON; the digest in hex."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "digest": self.digest.hex(),
            "tiers": [tier.to_dict() for tier in self.tiers],
        }
