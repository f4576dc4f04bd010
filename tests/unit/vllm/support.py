"""Plain data in place of vLLM's objects: what the tier reads of them, and nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvstore_vllm.layout import RowLayout, layout_of
from kvstore_vllm.options import TierOptions
from kvstore_vllm.rows import PrimaryRows
from kvstore_vllm.store_tier import StoreTier
from kvstore_vllm.transfers import Transfer

from kvstore import Namespace
from kvstore.plugins import Registry

CHUNK_TOKENS = 16
ROW_BYTES = 4096

TEXT_CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "_name_or_path": "wherever it was",
    "transformers_version": "5.19.0",
}


class TextConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def vllm_config(model: str = "org/model", *, text: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """A ``VllmConfig``; ``changes`` set attributes wherever they belong by name."""
    text_config = TextConfig(**{**TEXT_CONFIG, **(text or {})})
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": model,
            "revision": None,
            "dtype": "torch.bfloat16",
            "quantization": None,
            "max_model_len": 4096,
            "hf_text_config": text_config,
            "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"], _commit_hash=None),
        },
        "cache_config": {"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256"},
        "parallel_config": {"rank": 0, "world_size": 1, "nnodes_within_dp": 1, "distributed_executor_backend": "mp"},
    }
    for name, value in changes.items():
        owners = [section for section in sections.values() if name in section] or [sections["cache_config"]]
        owners[0][name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in sections.items()})


def offloading_config(**changes: Any) -> Any:
    """An ``OffloadingConfig``; ``changes`` set attributes of it or of its ``parallel``."""
    parallel = {
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "rank": 0,
        "world_size": 1,
        "is_parallelism_agnostic": True,
    }
    values: dict[str, Any] = {
        "groups": (SimpleNamespace(tokens_per_block=CHUNK_TOKENS, layer_names=("l.0", "l.1"), group_id=0),),
        "worker_kv_bytes_per_block": ROW_BYTES,
        "cache": SimpleNamespace(tokens_per_hash=CHUNK_TOKENS, blocks_per_chunk=1),
        "canonical_layout": False,
        "replicated_layout": False,
        "kv_cache_layout": "LBHNC",
    }
    for name, value in changes.items():
        (parallel if name in parallel else values)[name] = value
    return SimpleNamespace(parallel=SimpleNamespace(**parallel), **values)


def row_layout(*, kernel: str = "cuda/FLASH_ATTN", **changes: Any) -> RowLayout:
    return layout_of(
        offloading_config(**changes), row_bytes=ROW_BYTES, kv_dtype="bfloat16", kernel=kernel, vllm_config=vllm_config()
    )


def offload_key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def offload_keys(n_blocks: int, *, seed: int = 1, group: int = 0) -> list[bytes]:
    return [offload_key(seed << 32 | i, group) for i in range(n_blocks)]


def request(keys: Sequence[bytes] = (), *, name: str = "request", tokens: int = CHUNK_TOKENS) -> Any:
    """A ``ReqContext`` that knows the place of each key."""
    return SimpleNamespace(req_id=name, _offload_key_positions={key: (i + 1) * tokens for i, key in enumerate(keys)})


class View:
    """vLLM's CPU cache: rows in memory, and a two-dimensional memoryview of them."""

    def __init__(self, n_rows: int, row_bytes: int = ROW_BYTES) -> None:
        self.buffer = (ctypes.c_ubyte * (n_rows * row_bytes))()
        self.view = memoryview(self.buffer).cast("B", (n_rows, row_bytes))
        self.row_bytes = row_bytes

    def fill(self, row: int, value: int) -> bytes:
        data = bytes([(value + i) % 251 for i in range(self.row_bytes)])
        ctypes.memmove(ctypes.addressof(self.buffer) + row * self.row_bytes, data, self.row_bytes)
        return data

    def row(self, row: int) -> bytes:
        start = row * self.row_bytes
        return bytes(self.buffer[start : start + self.row_bytes])


class OpenTier:
    """A tier over a CPU cache of 64 rows."""

    def __init__(
        self, config: Mapping[str, Any], *, registry: Registry | None = None, want_events: bool = False, **options: Any
    ) -> None:
        self.view = View(64)
        self.tier = StoreTier(
            options=TierOptions(config=config, **options),
            layout=row_layout(),
            namespace=Namespace(model="m", revision="r"),
            rows=PrimaryRows(self.view.view),
            want_events=want_events,
            registry=registry,
        )
        self._job_ids = iter(range(1 << 20))

    def transfer(self, keys: Sequence[bytes], rows: Sequence[int], *, is_load: bool, context: Any = None) -> Any:
        """Run one job to its end and return its outcome."""
        job = Transfer(next(self._job_ids), keys, rows, is_load=is_load, context=context)
        (self.tier.load if is_load else self.tier.store)(job)
        assert self.tier.transfers.wait(10)
        (outcome,) = self.tier.finished()
        return outcome

    def store(self, keys: Sequence[bytes], *, context: Any = None) -> list[bytes]:
        """Store a block per key, written to the medium when the call returns; gives their bytes."""
        data = [self.view.fill(i, key[31]) for i, key in enumerate(keys)]
        self.transfer(keys, range(len(keys)), is_load=False, context=context)
        self.tier.cache.flush(10)
        return data

    def find(self, keys: Sequence[bytes], context: Any = None) -> list[bool | None]:
        """Look blocks up like a scheduler: one step, then until every answer is there."""
        context = context or request()
        answers = [self.tier.find(key, context) for key in keys]
        if None in answers:
            self.tier.ask()
            self.settle()
            answers = [self.tier.find(key, context) for key in keys]
        return answers

    def settle(self) -> None:
        import time

        end = time.monotonic() + 10
        while self.tier.lookups.waiting:
            assert time.monotonic() < end, "a lookup was never answered"
            time.sleep(0.001)  # the pause of a poll with a deadline

    def close(self) -> None:
        self.tier.close()
