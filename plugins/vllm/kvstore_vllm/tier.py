"""The tier as vLLM's offloading constructs it: ``{"type": "kvstore", ...}`` in ``secondary_tiers``.

This module translates between vLLM's types and :class:`~kvstore_vllm.store_tier.StoreTier`; the only
one of the tier's that imports vLLM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.plugins import Registry
from kvstore_vllm import metrics
from kvstore_vllm.identity import check_hash_algorithm, hash_caution, identify_model, namespace_of
from kvstore_vllm.layout import check_one_host, layout_of
from kvstore_vllm.options import TierOptions, read_options
from kvstore_vllm.rows import PrimaryRows
from kvstore_vllm.running_config import find_vllm_config
from kvstore_vllm.store_tier import StoreTier
from kvstore_vllm.transfers import Outcome, Transfer

logger = logging.getLogger("kvstore.vllm")


class KVStoreTier(SecondaryTierManager):
    """Keeps vLLM's offloaded KV in a kvstore cache.

    Args:
        offloading_spec: vLLM's, with its ``OffloadingConfig``.
        primary_kv_view: vLLM's CPU cache.
        tier_type: Name of the tier in vLLM's configuration.
        backpressure_detector: vLLM's, if configured.
        **given: The other keys of the tier's entry: see :class:`~kvstore_vllm.options.TierOptions`.

    Raises:
        ConfigError: An option or the store's config is wrong, or the set-up cannot be stored safely.
        BackendError: A required tier of the store cannot be opened.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = read_options(TierOptions, given, source=f"secondary tier {tier_type!r}")
        vllm_config = find_vllm_config()
        check_hash_algorithm(vllm_config, options)
        check_one_host(vllm_config, torch.cuda.device_count())
        identity = identify_model(vllm_config, options)
        for caution in (*identity.cautions, hash_caution(vllm_config)):
            if caution is not None:
                logger.warning("secondary tier %r: %s", tier_type, caution)
        rows = PrimaryRows(primary_kv_view)
        layout = layout_of(
            offloading_spec.config,
            row_bytes=rows.row_bytes,
            kv_dtype=identity.kv_dtype,
            kernel=_kernel(vllm_config),
            vllm_config=vllm_config,
        )
        self.locality = Locality(options.locality) if options.locality is not None else None
        events_on = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        if options.enable_kv_events and not events_on:
            logger.warning("secondary tier %r: enable_kv_events has no effect: vLLM's KV events are off", tier_type)
        try:
            self.store = StoreTier(
                options=options,
                layout=layout,
                namespace=namespace_of(identity, engine_layout=layout.tag, vllm_config=vllm_config),
                rows=rows,
                want_events=options.enable_kv_events and events_on,
                registry=self.plugin_registry(),
            )
        except BaseException:
            rows.close()  # or vLLM could not unmap its memory while it reports the error
            raise
        self._metrics = metrics.TierMetrics(self.store)

    @classmethod
    def plugin_registry(cls) -> Registry | None:
        """Where the store's backends come from; None for those that are installed.

        A subclass, loaded by ``module_path``, may add backends of its own.
        """
        return None

    # -- scheduling

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Only new chunks are offloaded: those of a hit are in the store."""
        del req_context
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from memory, or RETRY while the store is being asked."""
        present = self.store.find(key, req_context)
        if present is None:
            return LookupResult.RETRY
        return LookupResult.HIT if present else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the store about this step's lookups, all together."""
        del context
        self.store.ask()

    def has_pending_work(self) -> bool:
        """True while jobs run or lookups are under way."""
        return self.store.busy

    # -- transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to store chunks; the slots are vLLM's again when the job is reported."""
        self.store.store(_transfer(job_metadata, is_load=False))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to load chunks into slots."""
        self.store.load(_transfer(job_metadata, is_load=True))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call."""
        return [self._result(outcome) for outcome in self.store.finished()]

    def _result(self, outcome: Outcome) -> JobResult:
        whole = not outcome.failed
        partial = outcome.transfer.is_load and not whole and outcome.done
        return JobResult(
            job_id=outcome.transfer.job_id,
            success=whole,
            successful_keys=tuple(outcome.done) if partial else None,
            transfer_time=outcome.seconds,
            transfer_bytes=outcome.moved_blocks * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Wait until no transfer touches vLLM's memory; vLLM calls this to reset its caches."""
        self.store.drain()

    def shutdown(self) -> None:
        """Close the store, within ``drain_timeout`` and about 5 s."""
        self.store.close()

    # -- reports

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Stored and removed blocks for vLLM's KV events."""
        for event in self.store.take_events():
            yield OffloadingEvent(keys=event.keys, medium=self.medium, removed=event.removed, locality=self.locality)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Metrics that :meth:`get_stats` reports."""
        del extra_config
        counters = {
            name: OffloadingCounterMetadata(documentation=text, labelnames=(label,))
            for name, (text, label) in metrics.COUNTERS.items()
        }
        gauges = {
            name: OffloadingGaugeMetadata(documentation=text, labelnames=(label,))
            for name, (text, label) in metrics.GAUGES.items()
        }
        return {**counters, **gauges}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Observations since the last call."""
        stats = OffloadingConnectorStats()
        self._metrics.fill(stats)
        return None if stats.is_empty() else stats

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Labels of vLLM's info metric (0.33)."""
        del tier_config
        return ("kvstore_namespace", "kvstore_tiers")

    def config_info(self) -> dict[str, str]:
        """Values of the labels."""
        cache = self.store.cache
        return {
            "kvstore_namespace": cache.namespace.digest(cache.spec).hex(),
            "kvstore_tiers": ",".join(tier.name for tier in cache.config.l2),
        }


def _transfer(job: TransferJob, *, is_load: bool) -> Transfer:
    keys: Collection[OffloadKey] = job.keys
    return Transfer(
        job_id=job.job_id, keys=tuple(keys), chunk_ids=job.chunk_ids.tolist(), is_load=is_load, context=job.req_context
    )


def _kernel(vllm_config: Any) -> str:
    """What decides how K and V lie in a page, as far as the scheduler can know it.

    The attention backend where it is chosen by name; else what vLLM chooses it by: the platform and
    the generation of the device, or the instruction set.
    """
    platform = str(current_platform.device_name)
    if current_platform.is_cpu():
        flags = torch.backends.cpu.get_cpu_capability()
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return f"{platform}/{os.uname().machine}/{flags}{'+AMX' if amx else ''}"
    attention = getattr(vllm_config, "attention_config", None)
    chosen = getattr(attention, "backend", None)
    if chosen is not None and not getattr(attention, "backend_per_kind", None):
        return f"{platform}/{getattr(chosen, 'name', chosen)}"
    capability = current_platform.get_device_capability()
    return f"{platform}/auto/{getattr(capability, 'major', 'unknown')}"
