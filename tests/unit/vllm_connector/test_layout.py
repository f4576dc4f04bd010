"""Where blocks lie in an engine's tensors: found, or refused."""

from __future__ import annotations

import pytest
import torch
from kvstore_vllm.connector_layout import BlockGeometry, find_pages, layer_pages

from kvstore.errors import NotSupportedError


@pytest.mark.parametrize(
    ("shape", "blocks", "tokens", "expected"),
    [
        ((100, 3, 16, 128), 100, 16, (0, 1)),
        ((2, 100, 16, 3, 64), 100, 16, (1, 1)),
        ((100, 16, 576), 100, 16, (0, 1)),
        ((400, 3, 32, 128), 100, 128, (0, 4)),
        ((2, 200, 64, 3, 64), 100, 128, (1, 2)),
    ],
)
def test_the_axis_of_blocks_is_found(
    shape: tuple[int, ...], blocks: int, tokens: int, expected: tuple[int, int]
) -> None:
    assert find_pages(shape, BlockGeometry(blocks, tokens)) == expected


@pytest.mark.parametrize(
    ("shape", "blocks", "tokens", "why"),
    [
        ((2, 2, 16, 3, 64), 2, 16, "both could"),
        ((64, 64, 16, 64), 64, 16, "both could"),
        ((90, 3, 16, 128), 100, 16, "no axis"),
        ((100, 3, 24, 128), 100, 16, "no axis"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(shape: tuple[int, ...], blocks: int, tokens: int, why: str) -> None:
    with pytest.raises(NotSupportedError, match=why):
        find_pages(shape, BlockGeometry(blocks, tokens))


def test_what_vllm_says_about_its_axes_settles_it() -> None:
    assert find_pages((64, 64, 16, 64), BlockGeometry(64, 16, blocks_first=True)) == (0, 1)
    with pytest.raises(NotSupportedError, match="no axis"):
        find_pages((64, 64, 24, 64), BlockGeometry(64, 16, blocks_first=True))


@pytest.mark.parametrize(
    ("shape", "block_shape"),
    [
        ((10, 3, 16, 128), (2, 1, 3, 16, 128)),
        ((2, 10, 16, 3, 64), (2, 2, 16, 3, 64)),
        ((10, 16, 576), (2, 1, 16, 1, 576)),
    ],
)
def test_known_pages_are_described_element_by_element(shape: tuple[int, ...], block_shape: tuple[int, ...]) -> None:
    pages = layer_pages({f"l.{i}": torch.zeros(shape, dtype=torch.bfloat16) for i in range(2)}, BlockGeometry(10, 16))
    assert pages.spec.shape == block_shape
    assert pages.spec.dtype == "bfloat16"
    assert pages.by_layer


def test_other_pages_are_bytes() -> None:
    pages = layer_pages({"l.0": torch.zeros(10, 16, 3, 2, 8)}, BlockGeometry(10, 16))
    assert pages.spec.is_opaque
    assert pages.spec.nbytes == 16 * 3 * 2 * 8 * 4
    assert not pages.by_layer


def test_layers_stand_in_their_order_and_shared_ones_once() -> None:
    tensors = [torch.zeros(10, 3, 16, 8) for _ in range(3)]
    caches = {
        "model.layers.10.attn": tensors[2],
        "model.layers.2.attn": tensors[1],
        "model.layers.1.attn": tensors[0],
        "model.layers.11.attn": tensors[2],
    }
    pages = layer_pages(caches, BlockGeometry(10, 16))
    assert [layer.data_ptr() for layer in pages.layers] == [t.data_ptr() for t in tensors]
    assert pages.index_of["model.layers.11.attn"] == pages.index_of["model.layers.10.attn"] == 2


@pytest.mark.parametrize(
    "other", [torch.zeros(10, 4, 16, 8), torch.zeros(10, 3, 16, 8, dtype=torch.float16), [torch.zeros(10, 3)]]
)
def test_layers_that_keep_other_kv_are_refused(other: object) -> None:
    with pytest.raises(NotSupportedError, match=r"l\.1"):
        layer_pages({"l.0": torch.zeros(10, 3, 16, 8), "l.1": other}, BlockGeometry(10, 16))  # type: ignore[dict-item]


def test_no_tensors_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="no KV tensors"):
        layer_pages({}, BlockGeometry(10, 16))


def test_pages_of_a_block_follow_one_another() -> None:
    pages = layer_pages({"l.0": torch.zeros(40, 3, 8, 16)}, BlockGeometry(10, 32))
    assert pages.page_ids([3, 0]) == [12, 13, 14, 15, 0, 1, 2, 3]
    assert len(pages.pages().at(pages.page_ids([3, 0]))) == 2
