"""Which ranks share blocks, who writes them, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace as Attributes
from typing import Any

import pytest
from kvstore_vllm.connector_shard import Place, block_tokens_of, check_engine, in_one_process, shard_of
from kvstore_vllm.identity import ModelIdentity

from kvstore.errors import NotSupportedError
from tests.unit.vllm_connector.doubles import SPEC

IDENTITY = ModelIdentity("m", "r", "c", None, "bfloat16")


def config(rank: int, *, tp: int = 1, pp: int = 1, heads: int = 8, mla: bool = False, **more: Any) -> Any:
    def layers_of(parallel: Any) -> tuple[int, int]:
        stage = parallel.rank // tp
        return stage * 16, stage * 16 + 16

    model = Attributes(use_mla=mla, get_total_num_kv_heads=lambda: heads, get_layers_start_end_indices=layers_of)
    parallel = Attributes(rank=rank, world_size=tp * pp, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    return Attributes(model_config=model, parallel_config=parallel, speculative_config=None, **more)


def shards(**arguments: Any) -> list[Any]:
    world = arguments.get("tp", 1) * arguments.get("pp", 1)
    return [shard_of(IDENTITY, SPEC, "FLASH_ATTN", config(rank, **arguments)) for rank in range(world)]


def digests(found: list[Any]) -> list[bytes]:
    return [shard.namespace.digest(shard.spec) for shard in found]


def test_a_single_worker_holds_everything() -> None:
    (shard,) = shards()
    assert (shard.namespace.layers, shard.namespace.kv_heads, shard.writes) == (None, None, True)


def test_tensor_parallel_ranks_hold_heads_of_their_own() -> None:
    found = shards(tp=4)
    assert [shard.namespace.kv_heads for shard in found] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert len(set(digests(found))) == 4
    assert all(shard.writes for shard in found)


def test_ranks_with_the_same_heads_share_and_one_writes() -> None:
    found = shards(tp=8, heads=2)
    assert [shard.namespace.kv_heads for shard in found] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert len(set(digests(found))) == 2
    assert [shard.writes for shard in found] == [True, False, False, False] * 2


@pytest.mark.parametrize(("heads", "mla"), [(1, False), (8, True)])
def test_replicas_share_with_a_single_worker(heads: int, mla: bool) -> None:
    found = shards(tp=4, heads=heads, mla=mla)
    assert set(digests(found)) == set(digests(shards(heads=heads, mla=mla)))
    assert [shard.writes for shard in found] == [True, False, False, False]


def test_pipeline_stages_hold_layers_of_their_own() -> None:
    found = shards(tp=2, pp=2)
    assert [shard.namespace.layers for shard in found] == [(0, 16), (0, 16), (16, 32), (16, 32)]
    assert [shard.namespace.kv_heads for shard in found] == [(0, 4), (4, 8), (0, 4), (4, 8)]
    assert len(set(digests(found))) == 4


def test_another_attention_kernel_never_shares() -> None:
    one, other = (shard_of(IDENTITY, SPEC, kernel, config(0)) for kernel in ("CPU_ATTN/amx", "CPU_ATTN/vec"))
    assert one.namespace.digest(SPEC) != other.namespace.digest(SPEC)


def test_a_drafter_with_kv_of_its_own_never_shares_with_none() -> None:
    plain, ngram, eagle = config(0), config(0), config(0)
    ngram.speculative_config = Attributes(method="ngram", model="ngram")
    eagle.speculative_config = Attributes(method="eagle", model="draft", draft_model_config=None)
    found = [shard_of(IDENTITY, SPEC, "FLASH_ATTN", each).namespace.digest(SPEC) for each in (plain, ngram, eagle)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_the_ranks_hold_every_head(ranks: int, heads: int) -> None:
    if max(ranks, heads) % min(ranks, heads):
        pytest.skip("vLLM refuses this division")
    held = {place.head_range or (0, heads) for place in (Place(rank, ranks, heads) for rank in range(ranks))}
    assert sorted(head for start, end in held for head in range(start, end)) == list(range(heads))


class FullAttentionSpec:
    block_size = 16


class SlidingWindowSpec:
    block_size = 16


def groups(*specs: Any, per_hash: int | None = None) -> Any:
    return Attributes(kv_cache_groups=[Attributes(kv_cache_spec=spec) for spec in specs], hash_block_size=per_hash)


def test_full_attention_in_one_group_is_taken() -> None:
    check_engine(config(0), groups(FullAttentionSpec()))
    check_engine(config(0), groups(Attributes(kv_cache_specs={"a": FullAttentionSpec()})))
    assert block_tokens_of(groups(FullAttentionSpec(), per_hash=16)) == 16


@pytest.mark.parametrize(
    ("kv_groups", "why"),
    [
        (groups(FullAttentionSpec(), FullAttentionSpec()), "2 KV cache groups"),
        (groups(SlidingWindowSpec()), "SlidingWindowSpec"),
        (groups(Attributes(kv_cache_specs={"a": FullAttentionSpec(), "b": SlidingWindowSpec()})), "SlidingWindowSpec"),
    ],
)
def test_what_is_not_kept_for_every_token_is_refused(kv_groups: Any, why: str) -> None:
    with pytest.raises(NotSupportedError, match=why):
        check_engine(config(0), kv_groups)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name: str) -> None:
    vllm_config = config(0)
    setattr(vllm_config.parallel_config, name, 2)
    with pytest.raises(NotSupportedError, match=name):
        check_engine(vllm_config, groups(FullAttentionSpec()))


def test_hashes_of_another_size_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="8 tokens at a time"):
        block_tokens_of(groups(FullAttentionSpec(), per_hash=8))


@pytest.mark.parametrize(
    ("tp", "executor", "expected"), [(1, "uni", True), (1, "mp", False), (2, "mp", False), (1, None, False)]
)
def test_scheduler_and_worker_share_a_cache_in_one_process_only(tp: int, executor: str | None, expected: bool) -> None:
    vllm_config = config(0, tp=tp)
    vllm_config.parallel_config.distributed_executor_backend = executor
    assert in_one_process(vllm_config) is expected
