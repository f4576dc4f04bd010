"""put, get and get_each with pages: the same bytes as with dense tensors, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvstore import BlockSpec, BlockStatus, KVCache, PagedBlocks, paged_device, paged_rows
from tests.unit.paged.conftest import LANES, OpenPaged
from tests.unit.paged.pages import contents, key_for, opaque, page_bytes, random_layers

IDS, OUT_IDS = [7, 2, 9, 0, 3, 1, 8, 5], [1, 4, 6, 3, 0, 9, 2, 8]


def shaped(kind: str, seed: int, dtype: torch.dtype, n_tokens: int = 4) -> tuple[list[torch.Tensor], int]:
    """Three layers of ten pages (2, N, 2, 8) and their block_dim."""
    if kind == "pages first":
        return random_layers(3, (10, 2, n_tokens, 2, 8), dtype, seed), 0
    if kind == "keys and values first":
        return random_layers(3, (2, 10, n_tokens, 2, 8), dtype, seed), 1
    if kind == "heads before tokens in memory":
        return [t.transpose(2, 3) for t in random_layers(3, (10, 2, 2, n_tokens, 8), dtype, seed)], 0
    if kind == "gaps between pages":
        return [t[:, :2] for t in random_layers(3, (10, 3, n_tokens, 2, 8), dtype, seed)], 0
    return [t.transpose(3, 4) for t in random_layers(3, (10, 2, n_tokens, 8, 2), dtype, seed)], 0


KINDS = [
    "pages first",
    "keys and values first",
    "heads before tokens in memory",
    "gaps between pages",
    "elements apart",
]


def delivered(layers: list[torch.Tensor], dim: int, out: list[torch.Tensor], n_pages: int) -> bool:
    return all(
        page_bytes(layer, dim, a) == page_bytes(target, dim, b)
        for layer, target in zip(layers, out, strict=True)
        for a, b in zip(IDS[:n_pages], OUT_IDS[:n_pages], strict=True)
    )


def untouched(before: list[list[bytes]], out: list[torch.Tensor], dim: int, written: list[int]) -> bool:
    after = contents(out, dim)
    return all(
        old[page] == new[page]
        for old, new in zip(before, after, strict=True)
        for page in range(10)
        if page not in written
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "pages_per_block"),
    [(kind, torch.bfloat16, k) for kind in KINDS for k in (1, 2)]
    + [(KINDS[1], dtype, 2) for dtype in (torch.float8_e4m3fn, torch.float32)],
)
def test_pages_come_back_bit_for_bit(
    lane: str, kind: str, dtype: torch.dtype, pages_per_block: int, open_paged: OpenPaged
) -> None:
    layers, dim = shaped(kind, 0, dtype)
    out, _ = shaped(kind, 1, dtype)
    before, k = contents(out, dim), pages_per_block
    spec = BlockSpec(layers=3, kv_heads=2, head_dim=8, block_tokens=4 * k, dtype=str(dtype).removeprefix("torch."))
    cache, key = open_paged(spec), key_for(spec, 8 // k)

    assert cache.put(key, PagedBlocks(layers, IDS, block_dim=dim, pages_per_block=k)) == 8 // k
    dense = torch.empty(8 // k, *spec.shape, dtype=dtype)
    assert cache.get(key, dense) == 8 // k
    for i, block in enumerate(dense):
        pages = IDS[i * k : (i + 1) * k]
        want = torch.stack([torch.cat([layer.select(dim, p) for p in pages], dim=1) for layer in layers])
        assert torch.equal(block.view(torch.uint8), want.contiguous().view(torch.uint8))

    assert cache.get(key, PagedBlocks(out, OUT_IDS, block_dim=dim, pages_per_block=k)) == 8 // k
    assert delivered(layers, dim, out, 8)
    assert untouched(before, out, dim, OUT_IDS)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_opaque_blocks_hold_the_pages_in_order(lane: str, kind: str, open_paged: OpenPaged) -> None:
    layers, dim = shaped(kind, 0, torch.bfloat16)
    spec = opaque(layers, dim, pages_per_block=2)
    cache, key = open_paged(spec), key_for(spec, 2)
    assert cache.put(key, PagedBlocks(layers, IDS[:4], block_dim=dim, pages_per_block=2)) == 2

    out = torch.empty(2, *spec.shape, dtype=torch.uint8)
    assert cache.get(key, out) == 2
    for i in range(2):
        want = b"".join(page_bytes(layer, dim, p) for layer in layers for p in IDS[2 * i : 2 * i + 2])
        assert out[i].numpy().tobytes() == want


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_pages_behind_the_delivered_prefix_stay(
    lane: str, tiers: bool, small: bool, open_paged: OpenPaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, dim = shaped("pages first", 0, torch.bfloat16, 4 if small else 1024)
    out, _ = shaped("pages first", 1, torch.bfloat16, 4 if small else 1024)
    spec, before = opaque(layers), contents(out, dim)
    monkeypatch.setattr(paged_device, "STAGE_BYTES", 2 * spec.nbytes)
    monkeypatch.setattr(paged_rows, "_STAGING_BYTES", 2 * spec.nbytes)
    cache, key = open_paged(spec, tiers=tiers), key_for(spec, 8)
    cache.put(key.prefix(5), PagedBlocks(layers, IDS[:5]))
    if tiers:
        cache.flush()
        cache.close()
        cache = open_paged(spec, tiers=True)

    assert cache.get(key, PagedBlocks(out, OUT_IDS)) == 5
    assert delivered(layers, dim, out, 5)
    assert untouched(before, out, dim, OUT_IDS[:5])
    again = random_layers(3, tuple(out[0].shape), torch.bfloat16, 2)
    assert cache.get(key, PagedBlocks(again, OUT_IDS)) == 5  # from L1, promoted or not
    assert delivered(layers, dim, again, 5)


@pytest.mark.parametrize("tiers", [False, True])
def test_get_each_fills_around_holes(lane: str, tiers: bool, open_paged: OpenPaged) -> None:
    layers, _ = shaped("pages first", 0, torch.bfloat16)
    out, _ = shaped("pages first", 1, torch.bfloat16)
    spec, before = opaque(layers), contents(out, 0)
    cache, key = open_paged(spec, tiers=tiers), key_for(spec, 6)
    cache.put(key, PagedBlocks(layers, IDS[:6]))
    cache.flush()
    cache.delete(key[2:3])
    if tiers:
        cache.close()
        cache = open_paged(spec, tiers=True)

    statuses = cache.get_each(key, PagedBlocks(out, OUT_IDS[:6]))
    assert statuses == [BlockStatus.ABSENT if i == 2 else BlockStatus.DELIVERED for i in range(6)]
    for i in (0, 1, 3, 4, 5):
        assert all(page_bytes(a, 0, IDS[i]) == page_bytes(b, 0, OUT_IDS[i]) for a, b in zip(layers, out, strict=True))
    assert untouched(before, out, 0, [OUT_IDS[i] for i in (0, 1, 3, 4, 5)])


@pytest.mark.parametrize("l1", [True, False])
def test_put_is_a_snapshot(lane: str, l1: bool, open_paged: OpenPaged) -> None:
    layers, _ = shaped("pages first", 0, torch.bfloat16)
    kept = [layer.clone() for layer in layers]
    spec = opaque(layers)
    cache, key = open_paged(spec, tiers=True, enabled=l1), key_for(spec, 4)
    assert cache.put(key, PagedBlocks(layers, IDS[:4])) == 4
    for layer in layers:
        layer.zero_()
    cache.flush()

    assert cache.get(key, PagedBlocks(layers, OUT_IDS[:4])) == 4
    assert delivered(kept, 0, layers, 4)


def test_dense_and_listed_tensors_of_a_device(lane: str, open_paged: OpenPaged) -> None:
    spec = BlockSpec(layers=3, kv_heads=2, head_dim=8, block_tokens=4, dtype="float8_e5m2")
    (blocks,) = random_layers(1, (5, *spec.shape), torch.float8_e5m2, 0)
    cache, key = open_paged(spec), key_for(spec, 5)
    strided = blocks.transpose(0, 1).contiguous().transpose(0, 1)
    assert cache.put(key.prefix(2), list(blocks[:2])) == 2
    assert cache.put(key, strided) == 5

    whole, listed = torch.zeros_like(blocks), [torch.zeros_like(blocks[0]) for _ in range(5)]
    assert cache.get(key, whole) == cache.get(key, listed) == 5
    assert torch.equal(whole.view(torch.uint8), blocks.view(torch.uint8))
    assert torch.equal(torch.stack(listed).view(torch.uint8), blocks.view(torch.uint8))


def test_no_blocks_are_no_work(lane: str, open_paged: OpenPaged) -> None:
    layers, _ = shaped("pages first", 0, torch.bfloat16)
    cache, key = open_paged(opaque(layers)), key_for(opaque(layers), 0)
    assert cache.put(key, PagedBlocks(layers, [])) == 0
    assert cache.get(key, PagedBlocks(layers, [])) == 0
    assert cache.get_each(key, PagedBlocks(layers, [])) == []


@pytest.mark.parametrize("name", list(LANES))
def test_many_chunks(
    name: str, use_lane: Callable[[str], None], open_paged: OpenPaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_lane(name)
    layers = random_layers(5, (200, 3, 40), torch.bfloat16, 0)
    out = random_layers(5, (200, 3, 40), torch.bfloat16, 1)
    spec = opaque(layers)
    monkeypatch.setattr(paged_device, "STAGE_BYTES", 7 * spec.nbytes)
    monkeypatch.setattr(paged_rows, "_STAGING_BYTES", 7 * spec.nbytes)
    cache: KVCache = open_paged(spec)
    key, ids = key_for(spec, 100), torch.randperm(200, generator=torch.Generator().manual_seed(0))[:100]
    assert cache.put(key, PagedBlocks(layers, ids)) == 100
    assert cache.get(key, PagedBlocks(out, ids.flip(0))) == 100
    for a, b in zip(layers, out, strict=True):
        assert torch.equal(a[ids].view(torch.uint8), b[ids.flip(0)].view(torch.uint8))
