from __future__ import annotations

from collections import defaultdict
from typing import Any

from kvstore.compat import aibrix
from kvstore.compat.aibrix.metrics import KVCacheMetrics, KVCacheMetricsExporter, Operation
from tests.unit.compat.rig import ids_of, own_memory, store

Cache = aibrix.BaseKVCacheManager


def test_calls_are_counted_with_what_they_asked_for_and_got(cache: Cache) -> None:
    query = ids_of("tokens", 4)
    store(cache, None, query[:8])
    cache.exists(None, query)
    cache.acquire(None, query).get()[1].release()
    cache.get(query[:4], query[4:], own_memory(cache, 3)[1])
    cache.acquire(None, ids_of("tokens", 2, seed=1))
    calls = cache.metrics.mgr
    assert [operation.num_ops for operation in calls.operations] == [1, 1, 2, 1, 1]
    assert list(calls.acquire_metrics.num_fetched_tokens) == [8]
    assert list(calls.get_metrics.num_prefixes) == [4]
    assert (calls.num_tokens_hit, calls.num_tokens_miss) == (8 + 4, 8 + 8 + 8)
    assert "12 of 36 tokens hit (33.3%)" in cache.metrics.summary()
    cache.metrics.reset()
    assert not calls.get_metrics.num_prefixes
    assert calls.get_metrics.num_ops == 1


def test_a_miss_is_no_failure_and_a_refused_put_is_one(cache: Cache) -> None:
    query = ids_of("tokens", 2)
    cache.exists(None, query)
    cache.exists(query[:3], query[3:7])
    cache.put(None, query[:4], cache.allocate_for(None, query).get())
    calls = cache.metrics.mgr
    assert calls.exists_metrics.num_errors_by_reason == {"invalid": 1}
    assert calls.put_metrics.num_errors_by_reason == {"invalid": 1}
    assert calls.allocate_metrics.num_errors == 0


def test_metrics_that_nobody_resets_stay_small(cache: Cache) -> None:
    metrics = KVCacheMetrics()
    for _ in range(5000):
        metrics.mgr.record(Operation.EXISTS, (0, 4), aibrix.Status.ok(4), 0.1)
    assert metrics.mgr.exists_metrics.num_ops == 5000
    assert len(metrics.mgr.exists_metrics.num_tokens) == 4096


def test_times_are_kept_if_wanted() -> None:
    for wanted in (True, False):
        metrics = KVCacheMetrics(measures_time=wanted)
        metrics.mgr.record(Operation.PUT, (0, 4), aibrix.Status.ok(4), 2.5)
        assert metrics.time_measurement_enabled is wanted
        assert list(metrics.mgr.put_metrics.op_lat_ms) == ([2.5] if wanted else [])


class Series:
    """Counter or histogram of a metrics library: remembers what it was told, by labels."""

    made: dict[str, Series]

    def __init__(self, name: str, documentation: str, labelnames: list[str], buckets: Any = None) -> None:
        assert documentation
        self.labelnames, self.buckets = set(labelnames), buckets
        self.told: dict[tuple[tuple[str, str], ...], list[float]] = defaultdict(list)
        self.made[name] = self

    def labels(self, **labels: str) -> Any:
        assert labels.keys() == self.labelnames
        told = self.told[tuple(sorted(labels.items()))]
        return type("Child", (), {"inc": staticmethod(told.append), "observe": staticmethod(told.append)})


def test_metrics_are_exported_under_aibrixs_names(cache: Cache) -> None:
    query = ids_of("tokens", 2)
    store(cache, None, query)
    cache.get(None, query, own_memory(cache, 2)[1])
    cache.get(query[:3], query[3:7], own_memory(cache, 1)[1])
    made: dict[str, Series] = {}
    kind = type("Made", (Series,), {"made": made})
    exporter = KVCacheMetricsExporter(
        prefix="p_", labelnames=["engine"], counter_cls=kind, gauge_cls=kind, histogram_cls=kind
    )
    exporter.export({"engine": "e"}, cache.metrics)
    get = (("cache_type", "cachemgr"), ("engine", "e"), ("op_type", "get"))
    assert made["p_kv_cache_ol_num_ops"].told[get] == [2]
    assert made["p_kv_cache_ol_num_errors"].told[(*get, ("reason", "invalid"))] == [1]
    assert made["p_kv_cache_ol_iteration_fetched_tokens"].told[get] == [8]
    assert made["p_kv_cache_ol_iteration_tokens"].told[get] == [8, 4]
