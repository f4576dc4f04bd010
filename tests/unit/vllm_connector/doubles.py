"""What the connector sees of vLLM's scheduler: requests and step outputs, as plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kvstore_vllm.connector_keys import prompt_key
from kvstore_vllm.connector_lookup import ShardLookups
from kvstore_vllm.connector_scheduler import SchedulerHalf, SchedulerSettings

from kvstore import BlockSpec, KVCache, Namespace

BLOCK_TOKENS = 4
SPEC = BlockSpec(2, 2, 8, BLOCK_TOKENS, "bfloat16", layout="LCHND", kv=1)


class Request:
    """vLLM's request: hashes grow with the tokens, one for each full block."""

    def __init__(self, request_id: str, tokens: Iterable[int]) -> None:
        self.request_id = request_id
        self._tokens: list[int] = []
        self.block_hashes: list[bytes] = []
        self.append(tokens)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Iterable[int]) -> None:
        self._tokens += tokens
        while len(self.block_hashes) < len(self._tokens) // BLOCK_TOKENS:
            start = len(self.block_hashes) * BLOCK_TOKENS
            parent = self.block_hashes[-1] if self.block_hashes else b""
            block = str(self._tokens[start : start + BLOCK_TOKENS]).encode()
            self.block_hashes.append(hashlib.sha256(parent + block).digest())


@dataclass
class New:
    """vLLM's ``NewRequestData``."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class Cached:
    """vLLM's ``CachedRequestData``."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class Output:
    """vLLM's ``SchedulerOutput``."""

    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def first_step(request: Request, block_ids: Sequence[int], n_computed: int, n_scheduled: int) -> Output:
    """A request's first step."""
    new = New(request.request_id, (list(block_ids),), n_computed)
    return Output([new], num_scheduled_tokens={request.request_id: n_scheduled})


def later_step(
    request: Request, n_computed: int, n_scheduled: int, *, new_ids: Sequence[int] | None = None, resumed: bool = False
) -> Output:
    """A later step of a request."""
    ids = None if new_ids is None else (list(new_ids),)
    cached = Cached([request.request_id], [ids], [n_computed], {request.request_id} if resumed else set())
    return Output(scheduled_cached_reqs=cached, num_scheduled_tokens={request.request_id: n_scheduled})


OpenStore = Callable[..., KVCache]


def open_store(revision: str = "r", **config: Any) -> KVCache:
    """A store of one memory tier."""
    mapping = {"l1": {"enabled": False}, "l2": [{"backend": "memory", "capacity": "8MiB"}], **config}
    return KVCache.open(mapping, spec=SPEC, namespace=Namespace(model="m", revision=revision))


def fill(store: KVCache, request: Request, n_blocks: int, *, salt: str | None = None) -> torch.Tensor:
    """Store the leading blocks of a request; returns them."""
    blocks = torch.randn(n_blocks, *SPEC.shape).to(torch.bfloat16)
    store.put(prompt_key(request.block_hashes[:n_blocks], BLOCK_TOKENS, salt), blocks)
    store.flush(10)
    return blocks


def half_over(caches: Sequence[KVCache], **settings: Any) -> SchedulerHalf:
    """A scheduler half that asks these caches; it waits for answers, unless told otherwise."""
    half = SchedulerHalf(SchedulerSettings(BLOCK_TOKENS, **{"lookup_wait_s": 5.0, **settings}))
    half.use(ShardLookups(caches, BLOCK_TOKENS))
    return half
