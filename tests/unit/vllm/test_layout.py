"""Rows are shared between parallel set-ups exactly where their bytes are equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_vllm.layout import check_one_host, layout_of

from kvstore import ConfigError
from tests.unit.vllm.support import ROW_BYTES, offloading_config, row_layout, vllm_config


def tag(**changes: Any) -> str:
    return row_layout(**changes).tag


def test_a_row_is_an_opaque_block() -> None:
    layout = row_layout()
    assert layout.spec.is_opaque
    assert (layout.spec.nbytes, layout.spec.block_tokens, layout.group_tokens) == (ROW_BYTES, 16, (16,))


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_layout": "LBNHC"},
        {"groups": (SimpleNamespace(tokens_per_block=16, layer_names=("l.0",), group_id=0),)},
        {"cache": SimpleNamespace(tokens_per_hash=8, blocks_per_chunk=1)},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"kernel": "cuda/FLASHINFER"},
        {"is_parallelism_agnostic": False},
    ],
    ids=str,
)
def test_other_bytes_have_another_tag(changes: dict[str, Any]) -> None:
    assert tag(**changes) != tag()


def test_tensor_parallel_sizes_share_canonical_rows() -> None:
    assert tag(canonical_layout=True, tp_size=2) == tag(canonical_layout=True, tp_size=1)
    uncertified = {"canonical_layout": True, "is_parallelism_agnostic": False}
    assert tag(**uncertified, tp_size=2) != tag(**uncertified, tp_size=1)


def test_tensor_parallel_sizes_share_rows_whose_outermost_axis_is_the_heads() -> None:
    assert tag(kv_cache_layout="BHLNC", tp_size=2) == tag(kv_cache_layout="BHLNC")
    assert tag(kv_cache_layout="BHLNC", tp_size=2, is_parallelism_agnostic=False) != tag(kv_cache_layout="BHLNC")


def test_tensor_parallel_sizes_are_apart_where_layers_come_first() -> None:
    """Two ranks' rows are [layers, half the heads] twice, one rank's [layers, all heads]."""
    assert tag(kv_cache_layout="LBHNC", tp_size=2) != tag(kv_cache_layout="LBHNC")
    assert tag(kv_cache_layout="LBHNC", pp_size=2) == tag(kv_cache_layout="LBHNC")


def test_one_group_of_full_attention_is_looked_up_as_a_prefix() -> None:
    config = offloading_config()
    assert row_layout().prefix_only
    windowed = vllm_config(text={"sliding_window": 1024})
    assert not layout_of(config, row_bytes=ROW_BYTES, kv_dtype="bfloat16", kernel="k", vllm_config=windowed).prefix_only
    two = tuple(SimpleNamespace(tokens_per_block=16, layer_names=(f"l.{i}",), group_id=i) for i in range(2))
    assert not row_layout(groups=two).prefix_only


class TestOneHost:
    def test_ranks_on_several_hosts_are_refused_with_the_reason(self) -> None:
        with pytest.raises(ConfigError, match="one host's ranks only"):
            check_one_host(vllm_config(nnodes_within_dp=2, world_size=16), 8)

    def test_ray_over_more_ranks_than_accelerators_is_refused(self) -> None:
        config = vllm_config(distributed_executor_backend="ray", world_size=16)
        with pytest.raises(ConfigError, match="Ray with 8 accelerators"):
            check_one_host(config, 8)

    @pytest.mark.parametrize("devices", [0, 8])
    def test_one_host_is_fine(self, devices: int) -> None:
        check_one_host(vllm_config(world_size=8), devices)
        check_one_host(vllm_config(world_size=8, distributed_executor_backend="ray"), devices)
