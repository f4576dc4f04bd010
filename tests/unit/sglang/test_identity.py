"""Which ranks share pages, and which never do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_sglang.identity import Model, Place, namespace_of
from kvstore_sglang.page_format import page_spec
from kvstore_sglang.pool_store import key_group

from kvstore.errors import ConfigError
from tests.unit.sglang.pools import PAGE, MhaPool, MlaPool, StatePool

MODEL = Model(name="demo", revision="1")


def digest(pool: Any, place: Place, *, name: str = "kv", model: Model = MODEL) -> str:
    spec = page_spec(pool, name, block_tokens=PAGE)
    return namespace_of(pool, name, spec, place, model).digest(spec).hex()


def with_heads(n: int) -> MhaPool:
    pool = MhaPool()
    pool.head_num = n
    pool.kv_buffer = torch.zeros(2, 32, 2, n, 8, dtype=torch.bfloat16)
    pool.get_dummy_flat_data_page = lambda: torch.zeros(2 * 2 * PAGE * n * 8, dtype=torch.bfloat16)  # type: ignore[method-assign]
    pool.get_page_buffer_meta = lambda indices: (  # type: ignore[method-assign]
        [pool.kv_buffer.data_ptr()] * 2,
        [2 * PAGE * n * 8 * 2] * 2,
    )
    return pool


def heads_of(place: Place, held: int, total: int | None = None) -> tuple[int, int] | None:
    pool = with_heads(held)
    spec = page_spec(pool, "kv", block_tokens=PAGE)
    assert not spec.is_opaque
    return namespace_of(pool, "kv", spec, place, Model(name="demo", kv_heads=total)).kv_heads


def test_one_rank_holds_everything_and_needs_no_tag() -> None:
    pool = MhaPool()
    found = namespace_of(pool, "kv", page_spec(pool, "kv", block_tokens=PAGE), Place(), MODEL)
    assert (found.layers, found.kv_heads, found.engine_layout) == (None, None, None)
    assert (found.model, found.revision, found.engine) == ("demo", "1", "sglang")


def test_ranks_with_other_heads_do_not_share() -> None:
    digests = {digest(MhaPool(), Place(tp_rank=rank, tp_size=4)) for rank in range(4)}
    assert len(digests) == 4


def test_shards_are_named_by_their_heads() -> None:
    assert [heads_of(Place(tp_rank=r, tp_size=2), held=4, total=8) for r in range(2)] == [(0, 4), (4, 8)]
    assert heads_of(Place(tp_rank=1, tp_size=2), held=4) == (4, 8)


def test_ranks_that_hold_the_same_head_share_it() -> None:
    ranks = [heads_of(Place(tp_rank=r, tp_size=4), held=1, total=2) for r in range(4)]
    assert ranks == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert digest(with_heads(1), Place(tp_rank=0, tp_size=4), model=Model(name="demo", kv_heads=2)) == digest(
        with_heads(1), Place(tp_rank=1, tp_size=4), model=Model(name="demo", kv_heads=2)
    )


@pytest.mark.parametrize("total", [None, 3, 5, 16])
def test_heads_that_are_not_certain_are_named_by_rank_instead(total: int | None) -> None:
    assert heads_of(Place(tp_rank=1, tp_size=4), held=1, total=total) is None
    model = Model(name="demo", kv_heads=total)
    assert len({digest(with_heads(1), Place(tp_rank=r, tp_size=4), model=model) for r in range(4)}) == 4


def test_uncertain_heads_never_meet_certain_ones() -> None:
    uncertain = digest(with_heads(1), Place(tp_rank=3, tp_size=8))  # of 8 heads the fourth, of 4 heads the second
    certain = {digest(with_heads(1), Place(tp_rank=r, tp_size=4), model=Model(name="demo", kv_heads=4)) for r in (1, 3)}
    assert uncertain not in certain


def test_latents_are_shared_by_all_ranks_and_written_by_one() -> None:
    places = [Place(tp_rank=r, tp_size=4, replicated=True, is_writer=r == 0) for r in range(4)]
    assert len({digest(MlaPool(), place) for place in places}) == 1
    assert [place.writes("kv") for place in places] == [True, False, False, False]
    assert {digest(MlaPool(), Place())} == {digest(MlaPool(), place) for place in places}


def test_recurrent_state_is_a_shard_also_beside_latents() -> None:
    places = [Place(tp_rank=r, tp_size=2, replicated=True, is_writer=r == 0) for r in range(2)]
    assert len({digest(StatePool(), place, name="mamba") for place in places}) == 2
    assert all(place.writes("mamba") for place in places)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Place(pp_rank=0, pp_size=2), Place(pp_rank=1, pp_size=2)),
        (Place(cp_rank=0, cp_size=2), Place(cp_rank=1, cp_size=2)),
        (Place(cp_rank=0, cp_size=2), Place()),
        (Place(dcp_rank=0, dcp_size=2, page_tokens=8), Place(dcp_rank=1, dcp_size=2, page_tokens=8)),
        (Place(dcp_rank=0, dcp_size=2, page_tokens=8), Place(dcp_rank=0, dcp_size=2, page_tokens=16)),
    ],
)
def test_slices_of_a_page_are_kept_apart(first: Place, second: Place) -> None:
    assert digest(MlaPool(), first) != digest(MlaPool(), second)


def test_pipeline_stages_are_named_by_their_layers() -> None:
    first, second = MhaPool(), MhaPool()
    second.start_layer, second.end_layer = 2, 4
    assert digest(first, Place(pp_rank=0, pp_size=2)) != digest(second, Place(pp_rank=1, pp_size=2))
    spec = page_spec(second, "kv", block_tokens=PAGE)
    found = namespace_of(second, "kv", spec, Place(pp_rank=1, pp_size=2), MODEL)
    assert (found.layers, found.engine_layout) == ((2, 4), None)
    # the same layers in another split are the same bytes
    assert digest(second, Place(pp_rank=1, pp_size=2)) == digest(second, Place(pp_rank=1, pp_size=3))


def test_layers_that_do_not_add_up_are_named_by_stage() -> None:
    pool = MhaPool()
    pool.end_layer = 7
    spec = page_spec(pool, "kv", block_tokens=PAGE)
    assert namespace_of(pool, "kv", spec, Place(pp_size=2), MODEL).engine_layout == "sglang pp=0/2"


def test_packed_draft_layers_and_draft_pools_carry_the_draft_model() -> None:
    packed = MhaPool()
    packed.target_layer_num = 1  # type: ignore[attr-defined]
    one, other = Model(name="demo", draft="eagle-1"), Model(name="demo", draft="eagle-2")
    assert digest(packed, Place(), model=one) != digest(packed, Place(), model=other)
    assert digest(MhaPool(), Place(), name="draft", model=one) != digest(MhaPool(), Place(), name="draft", model=other)
    assert digest(MhaPool(), Place(), model=one) == digest(MhaPool(), Place(), model=other)


def test_dtype_layout_model_revision_config_and_scales_separate() -> None:
    pools = [MhaPool(), MhaPool("layer_first"), MhaPool(dtype=torch.float16)]
    eight_bit = MhaPool(dtype=torch.float8_e4m3fn)
    models = [
        Model(name="other", revision="1"),
        Model(name="demo", revision="2"),
        Model(name="demo", revision="1", text_config="rope"),
    ]
    scales = [Model(name="demo", revision="1", kv_scales=scale) for scale in (None, "a", "b")]
    digests = [digest(pool, Place()) for pool in pools] + [digest(pools[0], Place(), model=model) for model in models]
    digests += [digest(eight_bit, Place(), model=model) for model in scales]
    assert len(set(digests)) == 9
    assert digest(pools[0], Place(), model=scales[1]) == digest(pools[0], Place())  # 16-bit KV has no scales


def test_pools_of_one_shape_do_not_share() -> None:
    assert len({digest(MhaPool(), Place(), name=name) for name in ("kv", "swa", "draft", "indexer")}) == 4
    assert len({key_group(name) for name in ("kv", "swa", "draft", "indexer", "mamba")}) == 5


def test_groups_are_numbers_for_life() -> None:
    assert [key_group(name) for name in ("kv", "mamba", "swa")] == [0, 1_304_729_108, 1_504_568_342]


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="give 'model'"):
        digest(MhaPool(), Place(), model=Model(name=""))


def test_a_place_is_read_from_whatever_fields_a_version_has() -> None:
    bare = SimpleNamespace(tp_rank=1, tp_size=2, is_mla_model=True)
    assert Place.of(bare) == Place(tp_rank=1, tp_size=2, replicated=True, is_writer=False)
    fields = {"tp_rank": 3, "tp_size": 4, "pp_rank": 1, "pp_size": 2, "attn_cp_rank": 0, "attn_cp_size": 1}
    fields |= {"is_mla_model": True, "dcp_size": 2, "dcp_rank": 1, "logical_page_size": 64, "is_storage_writer": False}
    full = SimpleNamespace(**fields)
    place = Place.of(full)
    assert (place.pp_rank, place.dcp_rank, place.page_tokens, place.is_writer) == (1, 1, 64, False)
