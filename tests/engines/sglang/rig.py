"""SGLang's own host pools, factory and controller on a machine without a GPU.

SGLang wants a few packages whose code is never reached here (``_ABSENT``); where they are not installed, empty
modules take their place while SGLang is imported.  Nothing of SGLang itself is replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import torch

_ABSENT = ("IPython", "torchvision", "gguf")
PAGE = 4


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        root = name.partition(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if root in _ABSENT else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


@contextmanager
def _absent_packages() -> Iterator[None]:
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # transformers asks once, and is to hear the truth
    finder = _Finder()
    sys.meta_path.append(finder)  # last: what is installed is found before
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of SGLang's imports: no GPU, old spellings
    with _absent_packages():
        from sglang.srt import runtime_context
        from sglang.srt.managers import cache_controller
        from sglang.srt.mem_cache import hicache_storage, utils
        from sglang.srt.mem_cache.device_pool_info import (
            KVBufferLayout,
            KVBuffers,
            MambaStateBufferInfo,
            MHABufferInfo,
            MLABufferInfo,
        )
        from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
        from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
        from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
        from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
        from sglang.srt.mem_cache.storage import StorageBackendFactory
        from sglang.srt.observability.metrics_collector import StorageMetrics

__all__ = [
    "PAGE",
    "LogicalHostPool",
    "StorageBackendFactory",
    "StorageMetrics",
    "buffers_of",
    "cache_controller",
    "content",
    "hashes",
    "hicache_storage",
    "mamba_pool",
    "mha_pool",
    "mla_pool",
    "pages",
    "runtime_context",
    "scramble",
    "storage_config",
    "utils",
    "wipe",
]


def storage_config(extra_config: dict[str, Any], **fields: Any) -> Any:
    """A ``HiCacheStorageConfig`` as the controller makes it for one rank."""
    usual = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    usual |= {"is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True}
    named = {
        "backend_name": "kvstore",
        "module_path": "kvstore_sglang.storage",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
    }
    return hicache_storage.HiCacheStorageConfig(
        **(usual | {"model_name": "demo"} | fields), extra_config=named | extra_config
    )


def mha_pool(
    layout: str = "page_first",
    *,
    n_pages: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    v_head_dim: int = 8,
    page: int = PAGE,
) -> Any:
    """A host pool of two layers with three heads; K and V of different width when ``v_head_dim`` is not 8."""
    layers, heads, dim = 2, 3, 8
    k = tuple(torch.zeros(page, heads, dim, dtype=dtype) for _ in range(layers))
    v = tuple(torch.zeros(page, heads, v_head_dim, dtype=dtype) for _ in range(layers))
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=_addresses(k), v_data_ptrs=_addresses(v), layout=KVBufferLayout.NHD),
        page_size=page,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    kind = MHATokenToKVPoolHost if v_head_dim == dim else AsymmetricMHATokenToKVPoolHost
    return kind(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=page,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=n_pages * page,
    )


def mla_pool(layout: str = "page_first", *, n_pages: int = 16) -> Any:
    """A host pool of latents: two layers, 24 elements a token."""
    buffers = tuple(torch.zeros(PAGE, 1, 24, dtype=torch.bfloat16) for _ in range(2))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_addresses(buffers),
        layer_indices=(0, 1),
        device_layer_num=2,
        page_size=PAGE,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        kv_cache_dim=24,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=2,
        target_layer_num=2,
        host_token_capacity=n_pages * PAGE,
    )


def buffers_of(pool: Any) -> list[torch.Tensor]:
    """All memory of a host pool."""
    if hasattr(pool, "temporal_buffer"):
        return [pool.temporal_buffer, *pool.conv_buffer]
    return list(pool.kv_buffer) if isinstance(pool.kv_buffer, tuple) else [pool.kv_buffer]


def scramble(pool: Any, seed: int = 1) -> None:
    """Fill a host pool with random bytes, NaN and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def wipe(pool: Any) -> None:
    for buffer in buffers_of(pool):
        buffer.zero_()


def content(pool: Any) -> bytes:
    """All bytes of a host pool."""
    return b"".join(buffer.contiguous().view(torch.uint8).numpy().tobytes() for buffer in buffers_of(pool))


def pages(*numbers: int, each: int = PAGE) -> torch.Tensor:
    """Host indices of whole pages."""
    return torch.tensor([number * each + i for number in numbers for i in range(each)], dtype=torch.int64)


def hashes(n: int, first: int = 0) -> list[str]:
    return [f"{first + i:064x}" for i in range(n)]


def mamba_pool(*, n_pages: int = 16) -> Any:
    """A host pool of recurrent states: two layers, one convolution."""
    temporal = torch.zeros(2, 4, 3, 5, dtype=torch.float32)
    conv = torch.zeros(2, 4, 7, dtype=torch.bfloat16)
    info = MambaStateBufferInfo(temporal=temporal, conv=(conv,))
    return MambaPoolHost(info, n_pages / 4, 0, device_capacity=4, pin_memory=False, layout="page_first")


def _addresses(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
