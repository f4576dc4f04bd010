"""Why a tier lacks a block, as one sentence with what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstore.config.units import format_bytes
from kvstore.explain import Cause, TierReport
from kvstore.history import Event, Note

if TYPE_CHECKING:
    from kvstore.opening import OpenTier
    from kvstore.stack import Stack

_REMEDIES: Final = {
    "full": "the medium is full: make room, or lower the tier's capacity to what the medium has",
    "read_only": "the medium is read-only: mount it for writing",
    "denied": "this process may not write there: check owner, modes or credentials",
    "too_large": "one record is larger than the medium takes: raise the tier's capacity",
    "timeout": "the medium did not take it within the deadline: raise the deadline, or look at the medium",
    "unavailable": "the medium did not work: health() has its newest error",
    "L1 was full": "L1 was full of pinned blocks: release leases, or raise l1.capacity",
}

_STORIES: Final = {
    Event.STORED: (
        Cause.VANISHED,
        "it was there {ago}, and this process did not remove it: another one did, a lifecycle rule, or the medium",
    ),
    Event.EVICTED: (Cause.EVICTED, "evicted {ago} to make room for others: raise the tier's capacity{capacity}"),
    Event.DELETED: (Cause.DELETED, "delete() removed it {ago}: put it again"),
    Event.CLEARED: (Cause.CLEARED, "the namespace was cleared {ago} {by}: put it again"),
    Event.QUEUE_FULL: (
        Cause.QUEUE_FULL,
        "the write queue of {queue} was full when it was put {ago}: raise the tier's queue, or put slower",
    ),
    Event.DROPPED: (
        Cause.DROPPED,
        "its queued write was given up {ago} to make room in L1: raise l1.capacity, or put slower",
    ),
}
_LOST: Final = "it left L1 unwritten {ago}, because the write queue of {queue} was full: raise the tier's queue"

_BAD_RECORDS: Final = {
    "key": "a sound record of something else lies under its name (key): find out what else writes there",
    "spec": "a sound record of another block spec lies under its name (spec): find out what else writes there",
    "tag": "its record was not made with a key that this cache believes (tag): compare defaults.record_keys",
    "version": "a newer release made its record, or one with a key (version): upgrade, or set defaults.record_keys",
    "codec": "its codec is not installed or cannot open it (codec): install it, or give it the key it was sealed with",
}

_FAILED_CHECKS: Final = {"key": Cause.MISMATCH, "spec": Cause.MISMATCH, "tag": Cause.UNAUTHENTICATED}
"""Reasons of bad records that are not about damaged bytes."""


def ago(at: float) -> str:
    """How long ago a Unix time was."""
    seconds = max(0.0, time.time() - at)
    for span, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= span:
            return f"{seconds / span:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def bad_record(tier: str, reason: str, note: Note | None = None) -> TierReport:
    """A record that fails verification now or, with a note, did and was dropped."""
    what = _BAD_RECORDS.get(
        reason, f"its record failed verification ({reason}): look at the medium; kvstore verify does"
    )
    then = "a read drops it" if note is None else f"it was dropped {ago(note.at)}"
    detail = f"{what}; {then}, and the next put stores it anew"
    return TierReport(tier, _FAILED_CHECKS.get(reason, Cause.CORRUPT), detail, None if note is None else note.at)


class Absence:
    """Explains what a tier lacks, by what this process did and noticed; made before the tier is asked.

    Args:
        stack: The open cache.
        open_tier: The tier.
        digests: Every block that may be asked about.
        l1_blocks: Those of them that L1 holds.
    """

    def __init__(self, stack: Stack, open_tier: OpenTier, digests: Sequence[bytes], l1_blocks: set[bytes]) -> None:
        self._stack = stack
        self._open_tier = open_tier
        self._name = open_tier.tier.name
        # notes first: what is noted as stored is then either still in flight, or there when the tier is asked
        self._notes = dict(zip(digests, open_tier.tier.history.of(digests), strict=True))
        self._waiting = open_tier.writer.waiting(digests)
        self._used_once = stack.put_once.among(digests) if open_tier.admit == "hot" else set()
        self._in_l1 = l1_blocks

    def why(self, digest: bytes) -> TierReport | None:
        """The reason for one block; None when nothing is known of it."""
        if digest in self._waiting:
            return self._report(Cause.QUEUED, "it waits to be written, or is being written: flush() waits for it")
        note = self._notes[digest]
        if note is not None:
            return self._noted(note)
        admit = self._open_tier.admit
        if admit == "hot" and digest in self._used_once:
            text = 'admit = "hot" takes a block at its second use, and it had one: use it again, or set admit = "all"'
            return self._report(Cause.NOT_ADMITTED, text)
        if admit == "evicted" and digest in self._in_l1:
            text = 'admit = "evicted" takes a block when it leaves L1, and it is still there'
            return self._report(Cause.NOT_ADMITTED, text)
        return None

    def never(self, digest: bytes) -> TierReport:
        """Nothing is known of a block, and no other namespace that was asked has it."""
        hints = []
        cleared = self._open_tier.tier.history.cleared
        if cleared is not None:
            hints.append(f"the namespace was cleared {ago(cleared.at)} {cleared.detail}")
        if self._stack.seen.among([digest]):
            hints.append("a tier delivered it to this process before, so another process may have removed it")
        told = f" ({'; '.join(hints)})" if hints else ""
        text = f"this process knows of no write of it{told}: put it, or check token ids, salt, adapter and group"
        return self._report(Cause.NOT_STORED, text)

    def _report(self, cause: Cause, detail: str, at: float | None = None) -> TierReport:
        return TierReport(self._name, cause, detail, at)

    def _noted(self, note: Note) -> TierReport:
        if note.event is Event.CORRUPT:
            return bad_record(self._name, note.detail, note)
        cause, text = self._circumstances(note)
        return self._report(cause, text, note.at)

    def _circumstances(self, note: Note) -> tuple[Cause, str]:
        settings = self._open_tier.tier.settings
        capacity = settings.config.capacity
        if note.event is Event.REFUSED:
            remedy = _REMEDIES.get(note.detail, f"refused as {note.detail}")
            return Cause.REFUSED, f"not taken when it was put {ago(note.at)}; {remedy}"
        cause, text = _STORIES[note.event]
        if note.event is Event.DROPPED and note.detail:
            text = _LOST
        return cause, text.format(
            ago=ago(note.at),
            by=note.detail or "by this process",
            capacity=f" of {format_bytes(capacity)}" if capacity else "",
            queue=format_bytes(settings.queue_bytes),
        )
