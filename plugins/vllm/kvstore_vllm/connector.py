"""The connector class that vLLM constructs, for set-ups without its offloading tiers.

.. code-block:: text

    {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_vllm.connector",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"config": "kvstore.toml"}}

All that decides anything is in the scheduler's and the worker's half; this class only translates.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvstore.cache import KVCache
from kvstore.config import L1Config
from kvstore.engines.store_config import load_store_config
from kvstore.errors import ConfigError
from kvstore_vllm.connector_layout import BlockGeometry, LayerPages, layer_pages
from kvstore_vllm.connector_lookup import ShardLookups
from kvstore_vllm.connector_meta import StepPlan
from kvstore_vllm.connector_metrics import KVStoreConnectorStats, KVStorePromMetrics
from kvstore_vllm.connector_options import ConnectorOptions, read_connector_options
from kvstore_vllm.connector_scheduler import SchedulerHalf, SchedulerSettings
from kvstore_vllm.connector_shard import Shard, block_tokens_of, check_engine, in_one_process, shard_of
from kvstore_vllm.connector_worker import WorkerHalf, WorkerSettings
from kvstore_vllm.identity import check_hash_algorithm, hash_caution, identify_model

logger = logging.getLogger("kvstore.vllm")


@dataclasses.dataclass
class KVStoreConnectorMetadata(KVConnectorMetadata):
    """One step's plan, on its way to the workers."""

    plan: StepPlan


class ShardHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler about its shard, once.

    In one process the scheduler uses the worker's own cache, so that it sees its memory too; pickled,
    only the description travels.
    """

    def __init__(self, shard: Shard, cache: KVCache | None) -> None:
        self.shard = shard
        self.cache = cache

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cache behind: another process opens its own."""
        return {"shard": self.shard, "cache": None}


class KVStoreConnector(KVConnectorBase_V1):
    """Loads and saves vLLM's KV blocks through one kvstore cache per worker.

    vLLM makes one in the scheduler and one in every worker.  They exchange step plans from the scheduler
    to the workers and, at the start, each worker's shard the other way; there are no collectives.

    Args:
        vllm_config: vLLM's configuration.
        role: Scheduler or worker.
        kv_cache_config: vLLM's KV cache groups.
        **unknown: What later versions pass; ignored.

    Raises:
        ConfigError: A setting is wrong.
        NotSupportedError: The model or the parallel set-up cannot be stored exactly.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any, **unknown: Any) -> None:
        del unknown
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = read_connector_options(vllm_config)
        check_engine(vllm_config, kv_cache_config)
        check_hash_algorithm(vllm_config, self._options)
        self._check_load(vllm_config)
        self._block_tokens = block_tokens_of(kv_cache_config)
        self._worker: WorkerHalf | None = None
        self._handshake: ShardHandshake | None = None
        self._scheduler: SchedulerHalf | None = None
        self._lookups: ShardLookups | None = None
        self._own_caches: list[KVCache] = []
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(self._scheduler_settings(vllm_config))
            self._say_cautions(vllm_config)

    # -- what vLLM asks of the class

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, so nothing waits for delivery."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Moving single layers needs the calls between them, which a full CUDA graph skips."""
        return extra_config.get("load") == "layerwise" or bool(extra_config.get("layerwise_save"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreConnectorStats:
        """Make the stats object of what another process reported."""
        return KVStoreConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVStorePromMetrics:
        """Make the Prometheus metrics."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the store for the KV tensors that vLLM has allocated."""
        geometry = BlockGeometry(
            int(self._kv_cache_config.num_blocks),
            self._block_tokens,
            blocks_first=hasattr(self._kv_cache_config, "kv_cache_layout"),
        )
        pages = layer_pages(kv_caches, geometry)
        identity = identify_model(self._vllm_config, self._options)
        shard = shard_of(identity, pages.spec, self._kernel(kv_caches), self._vllm_config)
        config = load_store_config(self._options.config, salt=self._options.salt)
        if not in_one_process(self._vllm_config):  # what the scheduler's own cache has found must be loaded
            config = dataclasses.replace(config, gate=dataclasses.replace(config.gate, enabled=False))
        cache = KVCache.open(config, spec=shard.spec, namespace=shard.namespace)
        settings = WorkerSettings(
            workers=self._options.workers,
            writes=shard.writes and self._kv_transfer_config.is_kv_producer,
            layerwise_save=self._options.layerwise_save,
            salt=self._options.salt,
        )
        self._start_worker(cache, pages, settings)
        self._handshake = ShardHandshake(shard, cache)
        for caution in identity.cautions:
            logger.warning(caution)

    def unregister_kv_caches(self) -> None:
        """End what still uses memory that vLLM is about to give away (sleep)."""
        if self._worker is not None:
            self._worker.pause()

    def get_handshake_metadata(self) -> ShardHandshake | None:
        """What this worker holds, for the scheduler."""
        return self._handshake

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads; returns at once."""
        del forward_context, kwargs
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for one layer of the step's own loads."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """One layer has been computed."""
        del kv_layer, attn_metadata, kwargs
        if self._worker is not None:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """The step is over: its blocks are read before this returns, and written in the background."""
        if self._worker is not None:
            self._worker.finish_step(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose asynchronous loads are over; saves never keep a request's blocks."""
        if self._worker is None:
            return None, None
        idle = self.has_connector_metadata() and self._plan().idle
        return None, self._worker.take_finished(finished_req_ids, idle=idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute, because they could not be loaded."""
        return self._worker.take_failed() if self._worker is not None else set()

    def get_kv_connector_stats(self) -> KVStoreConnectorStats | None:
        """Sums since the last call."""
        sums: dict[str, float] = {}
        if self._worker is not None:
            sums = self._worker.take_tally()
        elif self._scheduler is not None:
            sums = self._scheduler.tally.take()
        return KVStoreConnectorStats(data=sums) if sums else None

    # -- the scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Every worker has said what it holds: open what is needed to look blocks up in all shards."""
        if self._scheduler is None or not self._kv_transfer_config.is_kv_consumer:
            return
        shards = {h.shard: h.cache for h in metadata.values() if isinstance(h, ShardHandshake)}
        distinct = {shard.namespace.digest(shard.spec): (shard, cache) for shard, cache in shards.items()}
        caches = [cache or self._open_for_lookups(shard) for shard, cache in distinct.values()]
        if caches:
            self._lookups = ShardLookups(caches, self._block_tokens)
            self._scheduler.use(self._lookups)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Likewise, from a vLLM that knows tensor-parallel ranks only."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in metadata.items()})

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Hear of the prefix cache, from which blocks of failed layerwise loads must go."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None and hasattr(kv_cache_manager, "evict_blocks"):
            self._scheduler.can_evict(kv_cache_manager.evict_blocks)

    def on_new_request(self, request: Any) -> None:
        """Start looking for the request's blocks before it is its turn."""
        self._scheduler_half().arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many more tokens the store has; None while that is being found out."""
        return self._scheduler_half().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else ()
        self._scheduler_half().allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVStoreConnectorMetadata:
        """Plan the step."""
        return KVStoreConnectorMetadata(self._scheduler_half().plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear what became of the loads."""
        half = self._scheduler_half()
        if connector_output.invalid_block_ids:
            half.loads_failed(connector_output.invalid_block_ids)
        if connector_output.finished_recving:
            half.loads_ended(connector_output.finished_recving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; its blocks are free at once, for its saves have been read already."""
        del block_ids
        self._scheduler_half().ended(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Make what was stored before unreachable in every tier, or for this engine; see ``on_reset``."""
        self._scheduler_half().reset()
        return True

    # -- both

    def shutdown(self) -> None:
        """Write out what is queued and release everything; idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if self._lookups is not None:
            self._lookups.close()
        for cache in self._own_caches:
            cache.close()
        self._own_caches.clear()

    # -- inner matters

    def _start_worker(self, cache: KVCache, pages: LayerPages, settings: WorkerSettings) -> None:
        if self._worker is not None:  # registered again, with other tensors
            self._worker.close()
        self._worker = WorkerHalf(cache, pages, settings)

    def _plan(self) -> StepPlan:
        plan: StepPlan = self._get_connector_metadata().plan
        return plan

    def _scheduler_half(self) -> SchedulerHalf:
        if self._scheduler is None:
            msg = "this is a worker's connector; vLLM asks the scheduler's"
            raise RuntimeError(msg)
        return self._scheduler

    def _scheduler_settings(self, vllm_config: Any) -> SchedulerSettings:
        options: ConnectorOptions = self._options
        return SchedulerSettings(
            block_tokens=self._block_tokens,
            loads=self._kv_transfer_config.is_kv_consumer,
            saves=self._kv_transfer_config.is_kv_producer,
            layerwise=options.load == "layerwise",
            verified_tail_tokens=int(vllm_config.speculative_config is not None),
            lookup_wait_s=options.lookup_wait,
            lookup_ttl_s=options.lookup_ttl,
            salt=options.salt,
            on_reset=options.on_reset,
        )

    def _check_load(self, vllm_config: Any) -> None:
        batches = int(getattr(vllm_config, "max_concurrent_batches", 1))
        if self._options.load == "layerwise" and batches > 1:
            raise ConfigError(
                f"kv_connector_extra_config.load = 'layerwise', but vLLM runs {batches} steps at once (asynchronous "
                "scheduling or pipeline parallelism): the step behind a failed load would compute on garbage; start "
                "vLLM with --no-async-scheduling, or use load = 'async'"
            )

    def _say_cautions(self, vllm_config: Any) -> None:
        caution = hash_caution(vllm_config)
        if caution is not None:
            logger.warning(caution)
        if self._kv_transfer_config.is_kv_consumer and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is 'fail' (vLLM's default): a request whose blocks cannot be loaded ends with "
                "an error; set it to 'recompute'"
            )

    def _open_for_lookups(self, shard: Shard) -> KVCache:
        config = load_store_config(self._options.config, salt=self._options.salt)
        if not config.l2:
            raise ConfigError(
                f"{config.source}: the config has L1 only, which the scheduler's process cannot see; add an [[l2]] tier"
            )
        config = dataclasses.replace(config, l1=L1Config(enabled=False))
        cache = KVCache.open(config, spec=shard.spec, namespace=shard.namespace)
        self._own_caches.append(cache)
        return cache

    def _kernel(self, kv_caches: Mapping[str, Any]) -> str:
        """Names of the attention kernels: they decide how K and V lie in a page, on CPUs by instruction set."""
        layers = self._vllm_config.compilation_config.static_forward_context
        names = set()
        for layer in (layers[name] for name in kv_caches if name in layers):
            backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else type(layer)
            name = backend.get_name() if hasattr(backend, "get_name") else backend.__name__
            names.add(f"{name}/{layer.isa}" if getattr(layer, "isa", None) else name)
        return ",".join(sorted(names)) or "unknown"
