"""Counters and health of an open cache, as plain data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvstore.l1.counters import L1Counters
from kvstore.l2.counters import TierCounters

HealthState = Literal["ok", "degraded", "down"]


@dataclass(slots=True)
class CacheCounters:
    """What callers asked for and got; blocks unless the name says otherwise.

    ``lookups == hits + misses`` holds at any quiet moment, and ``hits`` is the sum of the hits of
    L1 and of every tier.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    l1_hits: int = 0
    bytes_out: int = 0
    puts: int = 0
    put_refused: int = 0
    promoted: int = 0
    deleted: int = 0
    clears: int = 0


@dataclass(slots=True)
class GroupCounters:
    """How the ranks of a tensor-parallel group got on with each other.

    Attributes:
        size: Ranks of the group.
        rank: This one.
        agreements: Questions on which the ranks agreed, "nothing" included.
        mismatches: Questions that were different ones on some rank; the answer was nothing.
        failures: 1 when a rank did not answer in time, or is gone: every answer since is nothing.
        trimmed_blocks: Blocks that this rank had and another one lacked, so that none used them.
    """

    size: int
    rank: int
    agreements: int = 0
    mismatches: int = 0
    failures: int = 0
    trimmed_blocks: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """One L2 tier.

    Attributes:
        name: The tier's name in the config.
        counters: What happened there since open.
        queued_bytes: Raw bytes waiting to be written.
        records: Live records on the medium, of every process; -1 when the tier cannot say.
        payload_bytes: Bytes that count against the capacity; -1 when the tier cannot say.
        file_bytes: Bytes really taken from the medium; -1 when the tier cannot say.
        capacity_bytes: The configured bound, 0 when unbounded.
        orphaned_bytes: Bytes of records that no prefix reaches, because their parent left the medium;
            0 when the tier does not look.
        load_latency_s: Seconds that a read takes besides its bytes, as the newest reads say; 0 when they
            cannot tell it from the bandwidth.
        load_bytes_per_s: Raw bytes that a second of reading brings, as the newest reads say; 0 before four
            of them, or when more bytes take no longer.
    """

    name: str
    counters: TierCounters
    queued_bytes: int = 0
    records: int = -1
    payload_bytes: int = -1
    file_bytes: int = -1
    capacity_bytes: int = 0
    orphaned_bytes: int = 0
    load_latency_s: float = 0.0
    load_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """A consistent-enough picture of one cache; taking it costs microseconds per tier.

    Attributes:
        cache_id: Which open cache, unique within the process.
        cache: What callers asked for and got.
        l1: The L1 cache; None when it is disabled.
        tiers: The L2 tiers in lookup order.
        group: The agreement with other ranks; None without a group.
        prefill_tokens_per_s: The engine's prefill speed at the beginning of a prompt, as configured or
            learned; 0 while it is not known.
    """

    cache_id: str
    cache: CacheCounters
    l1: L1Counters | None
    tiers: tuple[TierStats, ...] = ()
    group: GroupCounters | None = None
    prefill_tokens_per_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """:meth:`to_dict` as one line of JSON, for programs."""
        return json.dumps(self.to_dict(), allow_nan=False)


@dataclass(frozen=True, slots=True)
class TierHealth:
    """State of one tier.

    Attributes:
        state: ``ok``; ``degraded`` (failing now and then, or read-only); ``down`` (not opened, or
            suspended by the breaker).
        detail: The newest error or what limits the tier; empty when ok.
    """

    state: HealthState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """State of an open cache.

    Attributes:
        state: ``ok`` when every part is, ``down`` when nothing can serve, ``degraded`` otherwise.
        tiers: By tier name.
        group: State of the agreement with other ranks; None without a group.
    """

    state: HealthState
    tiers: Mapping[str, TierHealth] = field(default_factory=dict)
    group: TierHealth | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and strings, ready for JSON."""
        plain: dict[str, Any] = {
            "state": self.state,
            "tiers": {n: dataclasses.asdict(t) for n, t in self.tiers.items()},
        }
        return plain if self.group is None else plain | {"group": dataclasses.asdict(self.group)}

    def to_json(self) -> str:
        """:meth:`to_dict` as one line of JSON, for programs."""
        return json.dumps(self.to_dict(), allow_nan=False)
