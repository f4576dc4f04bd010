"""Counters of calls, in the form in which AIBrix's users read and export them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final

from kvstore.compat.aibrix.status import Status

TOKEN_BUCKETS: Final = [1, *(1 << power for power in range(3, 14))]
MS_BUCKETS: Final = [1, 2, 3, 5, 8, 10, 20, 30, 50, 80, 100, 200, 300, 500, 800, 1000, 2000, 3000]

_KEPT: Final = 4096
"""Calls whose sizes are kept between two resets, so that a cache that nobody resets does not grow."""


class Metrics(ABC):
    """Something that is summed up and reset."""

    @abstractmethod
    def reset(self) -> None:
        """Begin a new interval; totals stay."""

    @abstractmethod
    def summary(self) -> str:
        """One line for people."""


class Operation(Enum):
    """Calls that are counted."""

    PUT = auto()
    GET = auto()
    ACQUIRE = auto()
    ALLOCATE = auto()
    EXISTS = auto()


_READS: Final = (Operation.GET, Operation.ACQUIRE)


class OpMetrics(Metrics):
    """Calls of one kind.

    Args:
        operation: Which.
        measures_time: Whether times are kept.

    Attributes:
        num_ops: Calls since open.
        num_errors: Failed ones; a miss is no failure, a refused put is one.
        num_errors_by_reason: Failures of this interval by code, in lower case.
        num_prefixes: Prefix tokens of each call of this interval, the newest 4,096.
        num_tokens: Query tokens likewise.
        num_fetched_tokens: Delivered tokens of each read likewise.
        op_lat_ms: Milliseconds likewise.
    """

    def __init__(self, operation: Operation, *, measures_time: bool) -> None:
        self.operation = operation
        self.measures_time = measures_time
        self.num_ops = 0
        self.num_errors = 0
        self.num_errors_by_reason: Counter[str] = Counter()
        self.num_prefixes: deque[int] = deque(maxlen=_KEPT)
        self.num_tokens: deque[int] = deque(maxlen=_KEPT)
        self.num_fetched_tokens: deque[int] = deque(maxlen=_KEPT)
        self.op_lat_ms: deque[float] = deque(maxlen=_KEPT)

    def add(self, prefix_tokens: int, query_tokens: int, status: Status[Any], lat_ms: float) -> None:
        """Count one call."""
        self.num_ops += 1
        if status.is_ok():
            if self.operation in _READS:
                self.num_fetched_tokens.append(delivered_tokens(status))
        elif not status.is_not_found() or self.operation in (Operation.PUT, Operation.ALLOCATE):
            self.num_errors += 1
            self.num_errors_by_reason[status.error_code.name.lower()] += 1
        self.num_prefixes.append(prefix_tokens)
        self.num_tokens.append(query_tokens)
        if self.measures_time:
            self.op_lat_ms.append(lat_ms)

    def reset(self) -> None:
        """Begin a new interval; totals stay."""
        self.num_errors_by_reason.clear()
        for interval in (self.num_prefixes, self.num_tokens, self.num_fetched_tokens, self.op_lat_ms):
            interval.clear()

    def summary(self) -> str:
        """Calls, tokens and time in one line."""
        parts = [f"{self.operation.name}: {self.num_ops} calls, {self.num_errors} failed"]
        intervals = {"prefix tokens": self.num_prefixes, "tokens": self.num_tokens}
        if self.operation in _READS:
            intervals["tokens delivered"] = self.num_fetched_tokens
        parts += [f"{sum(values)} {name}" for name, values in intervals.items()]
        if self.op_lat_ms:
            parts.append(f"{sum(self.op_lat_ms) / len(self.op_lat_ms):.3f} ms each")
        return ", ".join(parts)


class CacheMetrics(Metrics):
    """All calls of a cache; thread-safe.

    Args:
        measures_time: Whether times are kept.

    Attributes:
        put_metrics: Calls of ``put``; ``get_metrics`` and the others likewise.
        num_tokens_hit: Tokens that reads delivered, since open.
        num_tokens_miss: Tokens that reads were asked for and did not deliver.
    """

    def __init__(self, *, measures_time: bool = True) -> None:
        self.time_measurement_enabled = measures_time
        self.put_metrics, self.get_metrics, self.acquire_metrics, self.allocate_metrics, self.exists_metrics = (
            OpMetrics(operation, measures_time=measures_time) for operation in Operation
        )
        self.num_tokens_hit = 0
        self.num_tokens_miss = 0
        self._lock = threading.Lock()

    @property
    def operations(self) -> tuple[OpMetrics, ...]:
        """One entry per kind of call."""
        return (
            self.put_metrics,
            self.get_metrics,
            self.acquire_metrics,
            self.allocate_metrics,
            self.exists_metrics,
        )

    def record(self, operation: Operation, sizes: tuple[int, int], status: Status[Any], lat_ms: float) -> None:
        """Count one call of ``sizes``, its prefix and query tokens."""
        prefix_tokens, query_tokens = sizes
        with self._lock:
            self.operations[operation.value - 1].add(prefix_tokens, query_tokens, status, lat_ms)
            if operation in _READS:
                hit = delivered_tokens(status) if status.is_ok() else 0
                self.num_tokens_hit += hit
                self.num_tokens_miss += query_tokens - hit

    def reset(self) -> None:
        """Begin a new interval; totals stay."""
        with self._lock:
            for operation in self.operations:
                operation.reset()

    def summary(self) -> str:
        """One part per kind of call, and the hit rate."""
        with self._lock:
            parts = [operation.summary() for operation in self.operations if operation.num_ops]
            asked = self.num_tokens_hit + self.num_tokens_miss
            if asked:
                parts.append(f"{self.num_tokens_hit} of {asked} tokens hit ({self.num_tokens_hit / asked:.1%})")
        return "; ".join(parts)


class KVCacheMetrics(Metrics):
    """Metrics of a cache object.

    What happens in L1 and in each tier is in kvstore's own counters, ``cache.stats()``; so ``l1``
    and ``l2`` are None.

    Args:
        measures_time: Whether times are kept.

    Attributes:
        mgr: The calls.
    """

    def __init__(self, *, measures_time: bool = True) -> None:
        self.mgr = CacheMetrics(measures_time=measures_time)
        self.l1: CacheMetrics | None = None
        self.l2: CacheMetrics | None = None

    @property
    def time_measurement_enabled(self) -> bool:
        """Whether times are kept."""
        return self.mgr.time_measurement_enabled

    def reset(self) -> None:
        """Begin a new interval; totals stay."""
        self.mgr.reset()

    def summary(self) -> str:
        """One line for people."""
        return self.mgr.summary()


class KVCacheMetricsExporter:
    """Writes metrics to the counters and histograms of a metrics library, such as prometheus_client.

    Args:
        prefix: Before each name.
        labelnames: Labels of every series.
        counter_cls: Makes a counter from ``name``, ``documentation`` and ``labelnames``.
        gauge_cls: Not used: L1's use is in kvstore's own counters.
        histogram_cls: Like ``counter_cls``, with ``buckets``.
    """

    def __init__(
        self,
        *,
        prefix: str,
        labelnames: list[str],
        counter_cls: Callable[..., Any],
        gauge_cls: Callable[..., Any],
        histogram_cls: Callable[..., Any],
    ) -> None:
        del gauge_cls
        labels = [*labelnames, "cache_type", "op_type"]
        name = f"{prefix}kv_cache_ol_"
        self._ops = counter_cls(name=f"{name}num_ops", documentation="Calls.", labelnames=labels)
        self._errors = counter_cls(
            name=f"{name}num_errors", documentation="Failed calls.", labelnames=[*labels, "reason"]
        )
        self._histograms = {
            attribute: histogram_cls(
                name=f"{name}iteration_{series}", documentation=documentation, labelnames=labels, buckets=buckets
            )
            for attribute, series, documentation, buckets in (
                ("num_prefixes", "prefixes", "Prefix tokens of a call.", TOKEN_BUCKETS),
                ("num_tokens", "tokens", "Query tokens of a call.", TOKEN_BUCKETS),
                ("num_fetched_tokens", "fetched_tokens", "Tokens that a read delivered.", TOKEN_BUCKETS),
                ("op_lat_ms", "op_lat_ms", "Milliseconds of a call.", MS_BUCKETS),
            )
        }

    def export(self, labels: Mapping[str, str], metrics: KVCacheMetrics) -> None:
        """Write what was counted since the last ``metrics.reset()``."""
        for operation in metrics.mgr.operations:
            if not operation.num_ops:
                continue
            own = {**labels, "cache_type": "cachemgr", "op_type": operation.operation.name.lower()}
            self._ops.labels(**own).inc(len(operation.num_prefixes))
            for reason, n_calls in operation.num_errors_by_reason.items():
                self._errors.labels(**own, reason=reason).inc(n_calls)
            for attribute, histogram in self._histograms.items():
                for value in getattr(operation, attribute):
                    histogram.labels(**own).observe(value)


def delivered_tokens(status: Status[Any]) -> int:
    """Tokens of a successful read: the value of ``get``, the first of ``acquire``."""
    value = status.value
    return int(value[0] if isinstance(value, tuple) else value)
