"""vLLM's native offloading on a machine without an accelerator.

Stock vLLM refuses to offload on CPU for one reason only: its worker copies between device and host
with CUDA.  Here the worker copies between host and host; scheduler, CPU cache, tiers and everything
else are vLLM's own.  Loaded by ``spec_name`` and ``spec_module_path``.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

workers: list[HostCopyWorker] = []
"""Every worker of this process, newest last: tests read the engine's KV through it."""


class HostCopyWorker(OffloadingWorker):
    """Copies pages between the engine's KV tensors and rows of the CPU cache; done when it returns."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self.pages = []
        self._pairs = []
        for cache in kv_caches.tensors:
            pages = cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            self.pages.append(pages)
            self._pairs.append((pages, region.create_next_worker_view(cache.page_size_bytes)))
        self._region = region
        self._finished: list[TransferResult] = []

    def page_digest(self, block_id: int) -> str:
        """SHA-256 over the bytes of one block in every KV tensor."""
        h = hashlib.sha256()
        for pages in self.pages:
            h.update(pages[block_id].numpy().tobytes())
        return h.hexdigest()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec.block_ids, dst_spec.block_ids, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec.block_ids, src_spec.block_ids, to_host=False)

    def _copy(self, job_id: int, page_ids: Any, row_ids: Any, *, to_host: bool) -> bool:
        start_s = time.monotonic()
        at, to = (torch.as_tensor(np.asarray(ids), dtype=torch.long) for ids in (page_ids, row_ids))
        for pages, rows in self._pairs:
            if to_host:
                rows[to] = pages[at]
            else:
                pages[at] = rows[to]
        moved_bytes = sum(pages.shape[1] for pages in self.pages) * len(at)
        self._finished.append(
            TransferResult(job_id, success=True, transfer_size=moved_bytes, transfer_time=time.monotonic() - start_s)
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self.pages = []
        self._pairs = []
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):
    """The native tiering stack with a worker for machines without an accelerator."""

    _worker: HostCopyWorker | None

    def get_worker(self, kv_caches: Any) -> HostCopyWorker:
        if self._worker is None:
            _one_tensor_per_page(kv_caches.group_data_refs, self.blocks_per_chunk)
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(kv_caches, region)
            workers.append(self._worker)
        return self._worker


def _one_tensor_per_page(group_data_refs: Sequence[Any], blocks_per_chunk: int) -> None:
    if blocks_per_chunk != 1 or len(group_data_refs) != 1:
        msg = f"{len(group_data_refs)} KV groups, {blocks_per_chunk} blocks per chunk; this worker copies 1 and 1"
        raise NotImplementedError(msg)
