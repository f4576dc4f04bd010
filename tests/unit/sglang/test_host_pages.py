"""Pages as tensors: the same bytes whichever way a pool lays them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvstore_sglang.host_pages import HostPages, as_block
from kvstore_sglang.page_format import is_logical, page_nbytes, page_spec

from kvstore.errors import NotSupportedError
from tests.unit.sglang.pools import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    LogicalPool,
    LopsidedPool,
    MhaPool,
    MlaPool,
    StatePool,
    bytes_of,
    pages,
    wipe,
)

POOLS: dict[str, Callable[[], Any]] = {
    "page_first": lambda: MhaPool("page_first"),
    "layer_first": lambda: MhaPool("layer_first"),
    "page_first_direct": lambda: MhaPool("page_first_direct"),
    "page_head": lambda: MhaPool("page_head"),
    "float8": lambda: MhaPool("page_first", dtype=torch.float8_e4m3fn),
    "unknown dtype": lambda: MhaPool("page_first", dtype=torch.float64),
    "mla": MlaPool,
    "state": StatePool,
    "state with side tables": lambda: StatePool(with_addresses=False),
    "lopsided": LopsidedPool,
}


def opened(pool: Any, name: str = "kv") -> HostPages:
    return HostPages(pool, page_spec(pool, name, block_tokens=PAGE))


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("name", POOLS)
def test_pages_that_are_put_back_elsewhere_are_the_same_bytes(name: str) -> None:
    source, target = POOLS[name](), POOLS[name]()
    wipe(target)
    reader, writer = opened(source), opened(target)
    each = reader.indices_per_page
    stored = [content(page) for page in reader.select(pages(6, 1, each=each)).to_store()]
    room = writer.select(pages(2, 7, each=each))
    for tensor, data in zip(room.to_fill(), stored, strict=True):
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    room.filled(2)
    assert [content(page) for page in writer.select(pages(2, 7, each=each)).to_store()] == stored
    untouched = [0, 1, 3, 4, 5, 6]
    assert not any(any(content(p)) for p in writer.select(pages(*untouched, each=each)).to_store())
    assert len(set(stored)) == 2


@pytest.mark.parametrize("name", [name for name in POOLS if name != "lopsided"])
def test_a_page_is_the_flat_page_that_the_generic_interface_moves(name: str) -> None:
    pool = POOLS[name]()
    reader = opened(pool)
    each = reader.indices_per_page
    for number in (0, 5):
        (page,) = reader.select(pages(number, each=each)).to_store()
        assert content(page) == content(pool.get_data_page(number * each, flat=True))


@pytest.mark.parametrize("name", POOLS)
def test_pages_that_were_not_filled_stay_as_they_are(name: str) -> None:
    pool = POOLS[name]()
    before = bytes_of(pool)
    writer = opened(pool)
    room = writer.select(pages(0, 1, 2, each=writer.indices_per_page))
    room.to_fill()
    room.filled(0)
    assert bytes_of(pool) == before


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
def test_page_first_layouts_are_read_and_written_in_place(layout: str) -> None:
    pool = MhaPool(layout)
    room = opened(pool).select(pages(3))
    (view,) = room.to_fill()
    view.fill_(1)
    assert pool.get_data_page(3 * PAGE).eq(1).all()
    assert view.data_ptr() == pool._page(3 * PAGE).data_ptr()


@pytest.mark.parametrize(
    ("layout", "axes"),
    [("page_first", "CNLHD"), ("layer_first", "CLNHD"), ("page_first_direct", "CLNHD"), ("page_head", "CHNLD")],
)
def test_pages_of_known_shape_are_described_by_it(layout: str, axes: str) -> None:
    spec = page_spec(MhaPool(layout), "kv", block_tokens=PAGE)
    assert (spec.axes, spec.layers, spec.kv_heads, spec.head_dim, spec.block_tokens) == (axes, LAYERS, HEADS, DIM, PAGE)
    assert (spec.dtype, spec.kv, spec.is_opaque) == ("bfloat16", 2, False)


def test_a_latent_page_has_one_plane() -> None:
    spec = page_spec(MlaPool(), "kv", block_tokens=PAGE)
    assert (spec.kv, spec.kv_heads, spec.head_dim, spec.shape) == (1, 1, 24, (PAGE, 1, LAYERS, 1, 24))


@pytest.mark.parametrize("name", ["unknown dtype", "state", "lopsided"])
def test_other_pages_are_bytes_with_a_tag_that_names_their_layout(name: str) -> None:
    pool = POOLS[name]()
    spec = page_spec(pool, "kv", block_tokens=PAGE)
    assert spec.is_opaque
    assert spec.nbytes == page_nbytes(pool, "kv")
    assert spec.opaque_tag.startswith(f"sglang/kv/{type(pool).__name__}/page_first/")


def test_the_tag_tells_pools_layouts_and_dtypes_apart() -> None:
    tags = {
        page_spec(MhaPool(layout, dtype=dtype), name, block_tokens=PAGE).opaque_tag
        for layout in ("page_first", "layer_first")
        for dtype in (torch.bfloat16, torch.float16)
        for name in ("swa", "draft")
    }
    assert len(tags) == 8


def test_a_pool_without_pages_is_refused_by_name() -> None:
    pool = LopsidedPool()
    pool.layout = "layer_first"
    with pytest.raises(NotSupportedError, match=r"'kv' \(LopsidedPool, layout 'layer_first'\).*no flat pages"):
        page_spec(pool, "kv", block_tokens=PAGE)


def test_only_a_pool_without_memory_is_logical() -> None:
    assert is_logical(LogicalPool())
    assert not any(is_logical(make()) for make in POOLS.values())


def test_a_flat_page_of_another_size_is_refused() -> None:
    spec = page_spec(MhaPool(), "kv", block_tokens=PAGE)
    with pytest.raises(ValueError, match=f"a page of 8 bytes; expected {spec.nbytes}"):
        as_block(torch.zeros(8, dtype=torch.uint8), spec)


def test_a_pool_whose_pages_change_size_is_refused_before_a_byte_moves() -> None:
    pool = MhaPool()
    reader = opened(pool)
    halved = pool.get_page_buffer_meta

    def smaller(indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses, sizes = halved(indices)
        return addresses, [size // 2 for size in sizes]

    pool.get_page_buffer_meta = smaller  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="as at registration"):
        reader.select(pages(0))
