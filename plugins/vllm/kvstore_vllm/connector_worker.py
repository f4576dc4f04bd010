"""A worker's half of the connector: moves blocks between the engine's pages and the store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvstore.cache import KVCache
from kvstore.keys import BlockHashKey
from kvstore_vllm.connector_device import DeviceOrder
from kvstore_vllm.connector_keys import RequestKeys
from kvstore_vllm.connector_layers import LayerCopies, LayerLoad
from kvstore_vllm.connector_layout import LayerPages
from kvstore_vllm.connector_meta import BlockRun, StepPlan, Tally
from kvstore_vllm.connector_prefill import PrefillTimer

logger = logging.getLogger("kvstore.vllm")

# A step that computes nothing waits for a load so long at most, instead of being repeated at full speed.
_IDLE_WAIT_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker's half behaves.

    Attributes:
        workers: Threads that load.
        writes: Whether this rank stores its shard; of ranks with equal bytes one does.
        layerwise_save: Copy each layer out when it was computed.
        salt: Isolates a tenant.
    """

    workers: int = 4
    writes: bool = True
    layerwise_save: bool = False
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class _Since:
    """When a load was planned."""

    resets: int
    mark: torch.Event | None


class WorkerHalf:
    """Carries out step plans on one worker's pages; its methods are called by the engine's thread.

    *Who writes into the engine's memory.* Threads of this object, into the pages of a planned load only,
    and only until the load is reported as finished (asynchronous) or the step ends (layerwise); vLLM
    keeps the pages for that request so long, also when it is aborted.

    *Saving* reads the pages before :meth:`finish_step` returns; they may be given away then.

    A store that fails makes loads incomplete, which is reported, or saves refused, which is counted.

    Args:
        cache: This rank's open cache; closed by :meth:`close`.
        pages: The KV tensors.
        settings: How to behave.
    """

    def __init__(self, cache: KVCache, pages: LayerPages, settings: WorkerSettings) -> None:
        self._cache = cache
        self._pages = pages
        self._selection = pages.pages()
        self._order = DeviceOrder(pages.layers[0].device)
        self._settings = settings
        self._keys = RequestKeys(cache.spec.block_tokens, settings.salt)
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="kvstore-vllm-load")
        self._resets = 0
        self._layer_loads: list[LayerLoad] = []
        self._copies: LayerCopies | None = None
        self._under_way: set[Future[None]] = set()
        self._changed = threading.Condition()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._tally = Tally()
        self._warned: set[str] = set()
        self._prefills = PrefillTimer(pages.layers[0].device)

    # -- a step, in the order in which vLLM calls

    def begin_step(self, plan: StepPlan) -> None:
        """A step begins: follow resets before anything else."""
        if plan.resets != self._resets:
            with self._changed:
                self._resets = plan.resets
            self._keys = RequestKeys(self._cache.spec.block_tokens, plan.salt)
            if plan.clears:
                self._guarded("clear", self._cache.clear)  # its own memory, and what is queued
        if plan.saves and self._settings.writes and self._settings.layerwise_save and self._pages.by_layer:
            ids = [block for run in plan.saves for block in run.block_ids]
            self._copies = LayerCopies(self._pages, ids)

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the step's loads."""
        mark = self._order.mark() if plan.loads else None
        for run in plan.loads:
            key = self._keys.of(run)
            if plan.layerwise:
                load = LayerLoad(run.block_ids, len(self._pages.layers))
                self._layer_loads.append(load)
                self._submit(self._load_layers, load, key, mark)
            else:
                self._submit(self._load, run, key, _Since(self._resets, mark))
        if not plan.layerwise:  # such a step waits for its loads
            self._guarded("time a step", self._prefills.begin, plan.tokens, plan.context_tokens)

    def wait_for_layer(self, name: str) -> None:
        """Wait until one layer of every block that this step loads is filled, or its load has failed."""
        if self._layer_loads:
            layer = self._pages.index_of.get(name, len(self._pages.layers))
            for load in self._layer_loads:
                load.wait_for(layer)

    def layer_computed(self, name: str) -> None:
        """The step has computed one layer."""
        index = self._pages.index_of.get(name)
        if self._copies is not None and index is not None:
            self._copies.take(index)

    def finish_step(self, plan: StepPlan) -> None:
        """Join the step's own loads and hand over what is to be saved."""
        self._guarded("time a step", self._note_prefills)
        for load in self._layer_loads:
            failed = load.failed()
            with self._changed:
                self._count_load(len(load.block_ids), len(failed))
                self._failed.update(failed)
        self._layer_loads.clear()
        copies, self._copies = self._copies, None
        if plan.saves and self._settings.writes:
            self._guarded("store", self._save, plan.saves, copies)

    def take_finished(self, finished_request_ids: Iterable[str], *, idle: bool) -> set[str]:
        """Requests whose asynchronous loads are over since the last call.

        Args:
            finished_request_ids: Requests that will not be heard of again.
            idle: Whether the engine has nothing else to do, so that waiting a moment costs nothing.
        """
        with self._changed:
            if idle and not self._finished and self._under_way:
                self._changed.wait(_IDLE_WAIT_S)
            finished, self._finished = self._finished, set()
        self._keys.forget(finished_request_ids)
        return finished

    def take_failed(self) -> set[int]:
        """Pages that could not be filled since the last call."""
        with self._changed:
            failed, self._failed = self._failed, set()
        return failed

    def take_tally(self) -> dict[str, float]:
        """Sums since the last call."""
        with self._changed:
            return self._tally.take()

    # -- the rest of its life

    def pause(self) -> None:
        """Wait until nothing reads or writes the engine's pages."""
        for future in list(self._under_way):
            future.exception()

    def close(self) -> None:
        """End the loads, then close the cache, which writes what is queued."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cache.close()

    @property
    def n_under_way(self) -> int:
        """Loads that have not ended."""
        return len(self._under_way)

    # -- loads

    def _submit(self, call: Callable[..., None], *arguments: Any) -> None:
        future = self._pool.submit(call, *arguments)
        with self._changed:
            self._under_way.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        with self._changed:
            self._under_way.discard(future)
            self._changed.notify_all()

    def _load(self, run: BlockRun, key: BlockHashKey, since: _Since) -> None:
        start_s = time.monotonic()
        good = 0
        try:
            with self._order.behind(since.mark):
                good = self._cache.get(key, self._selection.at(self._pages.page_ids(run.block_ids)))
        except Exception as e:  # noqa: BLE001 - a border: whatever happens, the engine must hear of it
            self._warn("load", e)
        with self._changed:
            if since.resets != self._resets:
                good = 0  # of the weights before
            self._failed.update(run.block_ids[good:])
            self._finished.add(run.request_id)
            self._count_load(len(run), len(run) - good)
            self._tally.add("load_seconds", time.monotonic() - start_s)

    def _load_layers(self, load: LayerLoad, key: BlockHashKey, mark: torch.Event | None) -> None:
        start_s = time.monotonic()
        try:
            with self._order.behind(mark):
                load.run(self._cache, self._pages, key)
        except Exception as e:  # noqa: BLE001 - a border: whatever happens, the engine must hear of it
            self._warn("load", e)
        finally:
            load.end()
        with self._changed:
            self._tally.add("load_seconds", time.monotonic() - start_s)

    def _count_load(self, n_blocks: int, n_failed: int) -> None:
        self._tally.add("loads")
        self._tally.add("loaded_blocks", n_blocks - n_failed)
        self._tally.add("failed_blocks", n_failed)

    def _note_prefills(self) -> None:
        self._prefills.end()
        for prefill in self._prefills.take():
            self._cache.note_prefill(prefill.tokens, prefill.seconds, context_tokens=prefill.context_tokens)

    # -- saves

    def _save(self, runs: tuple[BlockRun, ...], copies: LayerCopies | None) -> None:
        start_s = time.monotonic()
        blocks = None if copies is None else copies.blocks()
        first = 0
        for run in runs:
            key = self._keys.of(run)
            pages = self._selection.at(self._pages.page_ids(run.block_ids))
            accepted = self._cache.put(key, pages if blocks is None else blocks[first : first + len(run)])
            first += len(run)
            self._tally_saved(accepted, len(run) - accepted)
        with self._changed:
            self._tally.add("save_seconds", time.monotonic() - start_s)

    def _tally_saved(self, n_accepted: int, n_refused: int) -> None:
        with self._changed:
            self._tally.add("saved_blocks", n_accepted)
            self._tally.add("refused_blocks", n_refused)

    def _guarded(self, what: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as e:  # noqa: BLE001 - a border: the store never fails the engine's step
            self._warn(what, e)

    def _warn(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("the store could not %s; it counts as a miss, and more are not logged: %r", what, error)
