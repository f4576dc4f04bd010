"""The connector's sums in vLLM's log lines and Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Name in the tally: what it counts. The metric is vllm:kvstore_<name>_total.
SUMS: Final = {
    "lookups": "Lookups of prompts.",
    "hit_blocks": "Blocks that vLLM was told can be loaded.",
    "loads": "Loads that were begun, one per request.",
    "loaded_blocks": "Blocks loaded into vLLM's memory.",
    "failed_blocks": "Blocks that could not be loaded and were computed.",
    "load_seconds": "Seconds spent loading, over all loads.",
    "saved_blocks": "Blocks handed to the store.",
    "refused_blocks": "Blocks that the store did not take.",
    "save_seconds": "Seconds that steps spent handing blocks to the store.",
}


@dataclass
class KVStoreConnectorStats(KVConnectorStats):
    """Sums since the last report; those of several ranks are added."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVStoreConnectorStats) -> KVStoreConnectorStats:
        """Add another rank's or interval's sums."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The sums, for a log line."""
        return {name: round(value, 3) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class KVStorePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per sum."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: metric_types[Counter](name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            for name, text in SUMS.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's sums."""
        counters = self._counters[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in counters and value > 0:
                counters[name].inc(value)
