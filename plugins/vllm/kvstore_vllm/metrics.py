"""What the tier reports to vLLM's Prometheus endpoint."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kvstore_vllm.lookups import LookupCounters

if TYPE_CHECKING:
    from kvstore_vllm.store_tier import StoreTier

LOOKUPS: Final = "vllm:kv_offload_kvstore_lookups"
LOADED: Final = "vllm:kv_offload_kvstore_load_blocks"
STORED: Final = "vllm:kv_offload_kvstore_store_blocks"
HEALTH: Final = "vllm:kv_offload_kvstore_health"
QUEUED: Final = "vllm:kv_offload_kvstore_queued_bytes"

COUNTERS: Final = {
    LOOKUPS: (
        "Lookups of blocks: remembered, asked (the store was asked), gave_up (no answer came in time).",
        "result",
    ),
    LOADED: ("Blocks that were to be loaded, by what became of them.", "result"),
    STORED: ("Blocks that were to be stored, by what became of them; known ones were stored already.", "result"),
}
GAUGES: Final = {
    HEALTH: ("Health of each tier of the store: 0 ok, 1 degraded, 2 down.", "tier"),
    QUEUED: ("Bytes of blocks that wait to be written, per tier of the store.", "tier"),
}

_STATES: Final = {"ok": 0, "degraded": 1, "down": 2}
_EVERY_S: Final = 5.0  # the gauges change slowly, and the engine asks at every step


class TierMetrics:
    """Changes since they were reported last; used by one thread at a time."""

    def __init__(self, tier: StoreTier) -> None:
        self._tier = tier
        self._lookups = LookupCounters()
        self._gauges_due = 0.0

    def fill(self, stats: Any) -> None:
        """Add what is new to vLLM's ``OffloadingConnectorStats``; adds nothing when nothing is."""
        now = self._tier.lookups.counters
        for name in ("remembered", "asked", "gave_up"):
            new = getattr(now, name) - getattr(self._lookups, name)
            if new:
                stats.increase_counter(LOOKUPS, new, (name,))
                setattr(self._lookups, name, getattr(now, name))
        for (what, result), blocks in self._tier.transfers.take_counts().items():
            stats.increase_counter(LOADED if what == "load" else STORED, blocks, (result,))
        if time.monotonic() >= self._gauges_due:
            self._gauges_due = time.monotonic() + _EVERY_S
            for name, health in self._tier.cache.health().tiers.items():
                stats.set_gauge(HEALTH, _STATES[health.state], (name,))
            for tier in self._tier.cache.stats().tiers:
                stats.set_gauge(QUEUED, tier.queued_bytes, (tier.name,))
