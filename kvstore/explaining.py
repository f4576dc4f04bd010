"""Puts an explanation together: L1, each tier, other namespaces, and the way of a prefix read through them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvstore.absence import Absence, ago, bad_record
from kvstore.explain import HOLDING, BlockReport, Cause, TierReport
from kvstore.history import Event
from kvstore.inspection import READ_BYTES, Found, Inspection
from kvstore.other_namespaces import OtherNamespace, Sought, holders, neighbours
from kvstore.served import L1
from kvstore.types import BlockStatus

if TYPE_CHECKING:
    from kvstore.keys import KVCacheKey
    from kvstore.opening import OpenTier
    from kvstore.stack import Stack

Column = list[TierReport]
"""What one tier says of each block of a key."""

_ELSEWHERE_BLOCKS: Final = 64  # blocks of unknown fate that other namespaces are asked for; one is told from the next


class Explanation:
    """Explains one key; changes nothing but what any question to a medium changes (its breaker).

    Args:
        stack: The open cache.
        key: What is to be explained.
        until: End of the time, on the monotonic clock.
    """

    def __init__(self, stack: Stack, key: KVCacheKey, until: float) -> None:
        self._stack = stack
        self._key = key
        self._until = until
        self._digests = key.digests

    def reports(self) -> list[BlockReport]:
        """One report for each block, in key order."""
        if not self._digests:
            return []
        columns = {L1: self._l1()}
        in_l1 = {d for d, cell in zip(self._digests, columns[L1], strict=True) if cell.cause is Cause.PRESENT}
        open_tiers = {open_tier.tier.name: open_tier for open_tier in self._stack}
        left = len(open_tiers)
        for config in self._stack.config.l2:
            open_tier = open_tiers.get(config.name)
            if open_tier is None:
                columns[config.name] = self._not_opened(config.name)
                continue
            columns[config.name] = self._tier(open_tier, in_l1, left)
            left -= 1
        self._gate(columns)
        return self._walk(list(columns.values()))

    # -- one source each

    def _all(self, tier: str, cause: Cause, detail: str) -> Column:
        return [TierReport(tier, cause, detail)] * len(self._digests)

    def _l1(self) -> Column:
        l1, digests = self._stack.l1, self._digests
        if l1 is None:
            return self._all(L1, Cause.L1_DISABLED, "l1.enabled is false: every read goes to the tiers")
        evicted = l1.evicted_lately(digests)
        delivered = self._stack.seen.among(digests)
        notes = self._stack.l1_history.of(digests)
        column = []
        for digest, there, note in zip(digests, l1.contains(digests), notes, strict=True):
            if there:
                cell = TierReport(L1, Cause.PRESENT, "in host memory")
            elif digest in evicted:
                cell = TierReport(L1, Cause.EVICTED, "evicted to make room for others: raise l1.capacity")
            elif note is not None and note.event is Event.REFUSED:
                text = (
                    f"L1 was full of pinned blocks when it was put {ago(note.at)}: release leases, or raise l1.capacity"
                )
                cell = TierReport(L1, Cause.REFUSED, text, note.at)
            elif note is not None and note.event is Event.DELETED:
                cell = TierReport(L1, Cause.DELETED, f"delete() removed it {ago(note.at)}: put it again", note.at)
            elif note is not None:
                text = f"the namespace was cleared {ago(note.at)} {note.detail}: put it again"
                cell = TierReport(L1, Cause.CLEARED, text, note.at)
            elif digest in delivered:
                text = "a tier delivered it once, straight to the caller: L1 keeps it at the second read"
                cell = TierReport(L1, Cause.NOT_ADMITTED, text)
            else:
                text = "neither put nor loaded by this process, as far as it remembers: L1 holds nothing of others"
                cell = TierReport(L1, Cause.NOT_STORED, text)
            column.append(cell)
        return column

    def _not_opened(self, name: str) -> Column:
        error = self._stack.absent_errors.get(name, "it joins just now")
        return self._all(name, Cause.NOT_OPENED, f"the tier could not be opened and is tried again: {error}")

    def _tier(self, open_tier: OpenTier, in_l1: set[bytes], tiers_left: int) -> Column:
        tier = open_tier.tier
        if tier.suspended:
            text = f"reads are suspended after repeated failures, the newest one: {tier.last_error}"
            return self._all(tier.name, Cause.TIER_DOWN, text)
        now = time.monotonic()
        if now >= self._until:
            return self._all(tier.name, Cause.NO_ANSWER, "no time was left to ask: raise defaults.deadline")
        # a tier that hangs must leave time for those behind it
        call = tier.call(now + (self._until - now) / max(1, tiers_left))
        # what is written meanwhile must not count as vanished
        absence = Absence(self._stack, open_tier, self._digests, in_l1)
        found = Inspection(open_tier, self._key, call).look()
        cells: list[TierReport | None] = [
            absence.why(digest) if one.status is BlockStatus.ABSENT else self._seen(open_tier, one, late=call.stop())
            for digest, one in zip(self._digests, found, strict=True)
        ]
        unknown = [i for i, cell in enumerate(cells) if cell is None]
        elsewhere = self._elsewhere(open_tier, unknown)
        return [
            cell or self._other(tier.name, elsewhere.get(i)) or absence.never(self._digests[i])
            for i, cell in enumerate(cells)
        ]

    def _seen(self, open_tier: OpenTier, one: Found, *, late: bool) -> TierReport:
        """What a look found, other than nothing."""
        tier = open_tier.tier
        if one.reason:
            return bad_record(tier.name, one.reason)
        if one.status is BlockStatus.DELIVERED:
            unread = f"the tier says so; it was not read, for a look reads {READ_BYTES >> 20} MiB of a tier at most"
            return TierReport(tier.name, Cause.PRESENT, "its record was read and verified" if one.read else unread)
        if late or one.status is BlockStatus.TIMEOUT:
            text = f"no answer in time (the tier's deadline is {tier.settings.deadline_s:g} s): look at the medium"
            return TierReport(tier.name, Cause.NO_ANSWER, text)
        return TierReport(tier.name, Cause.TIER_DOWN, f"the tier failed: {tier.last_error or 'it could not say'}")

    # -- other namespaces

    def _elsewhere(self, open_tier: OpenTier, unknown: Sequence[int]) -> dict[int, OtherNamespace]:
        """Which of these blocks other namespaces of the tier hold."""
        tier, identity = open_tier.tier, self._stack.identity
        wanted = list(unknown[:_ELSEWHERE_BLOCKS])
        call = tier.call(self._until)
        if not wanted or tier.suspended or call.stop():
            return {}

        def ask() -> dict[int, OtherNamespace]:
            others = neighbours(tier.backend.namespaces(), identity.namespace, identity.spec)
            return holders(tier.backend, others, Sought.of(self._key), wanted, call)

        found = tier.guarded("exists_many", ask if tier.direct else lambda: tier.in_worker(ask, call)) or {}
        if len(found) == len(wanted) and len(unknown) > len(wanted):  # so it is for the rest of the prompt
            found |= dict.fromkeys(unknown, found[wanted[-1]])
        return found

    @staticmethod
    def _other(tier: str, other: OtherNamespace | None) -> TierReport | None:
        if other is None:
            return None
        name = other.digest.hex()[:12]
        text = f"namespace {name} has it, this one does not; they differ in {other.describe()}"
        return TierReport(tier, Cause.NAMESPACE_DIFFERS, text)

    # -- the way of a prefix read

    def _gate(self, columns: dict[str, Column]) -> None:
        """Mark what a read would decline because computing is faster."""
        taken = [False] * len(self._digests)
        for name, column in columns.items():
            there = [cell.cause is Cause.PRESENT for cell in column]
            start = next((i for i, here in enumerate(there) if here and not taken[i]), None)
            if name != L1 and start is not None:
                n_blocks = len(column) - start
                verdict = self._stack.gate.verdict(name, n_blocks, self._key.start_block + start)
                if verdict.declined:
                    text = (
                        f"it is there, but loading {n_blocks} blocks takes {verdict.load_s:.3f} s and computing them "
                        f"{verdict.recompute_s:.3f} s: nothing to do, or set gate.enabled = false"
                    )
                    column[start:] = [
                        replace(cell, cause=Cause.GATED, detail=text) if here else cell
                        for cell, here in zip(column[start:], there[start:], strict=True)
                    ]
                    there[start:] = [False] * n_blocks
            taken = [a or b for a, b in zip(taken, there, strict=True)]

    def _walk(self, columns: Sequence[Column]) -> list[BlockReport]:
        """Follow a prefix read to its end; what is there behind that stands behind a hole."""
        reports: list[BlockReport] = []
        hole: int | None = None
        for i, digest in enumerate(self._digests):
            cells = [column[i] for column in columns]
            if hole is None and all(cell.cause is not Cause.PRESENT for cell in cells):
                hole = i
            present = any(cell.cause in HOLDING for cell in cells)
            if hole is not None and hole < i:
                gated = any(cell.cause is Cause.GATED for cell in (column[hole] for column in columns))
                why = "is not worth loading" if gated else "is missing in every tier"
                text = (
                    f"it is there, but block {hole} before it {why}, so a prefix read ends there: get_each() reads it"
                )
                cells = [
                    replace(cell, cause=Cause.BEHIND_A_HOLE, detail=text) if cell.cause is Cause.PRESENT else cell
                    for cell in cells
                ]
            reports.append(BlockReport(i, digest, present, hole is None, tuple(cells)))
        return reports
