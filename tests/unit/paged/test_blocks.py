"""What PagedBlocks accepts, and what it says about the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore import BlockSpec, PagedBlocks, SpecMismatchError
from kvstore.tensors import rows_of
from tests.unit.paged.pages import opaque, random_layers

SPEC = BlockSpec(layers=3, kv_heads=2, head_dim=8, block_tokens=4, dtype="bfloat16")


def layers(shape: tuple[int, ...] = (10, 2, 4, 2, 8), n_layers: int = 3) -> list[torch.Tensor]:
    return random_layers(n_layers, shape, torch.bfloat16, 0)


def accept(paged: PagedBlocks, spec: BlockSpec = SPEC, *, writable: bool = False) -> int:
    return len(rows_of(paged, spec, len(paged), argument="out" if writable else "blocks", writable=writable))


def test_length_counts_blocks() -> None:
    assert len(PagedBlocks(layers(), [4, 1, 7, 0], pages_per_block=2)) == 2
    assert len(PagedBlocks(layers(), [])) == 0


@pytest.mark.parametrize("ids", [torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.int32), (3, 1), range(1, 3)])
def test_ids_of_any_integer_sequence(ids: Any) -> None:
    assert PagedBlocks(layers(), ids).ids.tolist() == list(map(int, ids))


def test_ids_are_a_copy() -> None:
    ids = torch.tensor([3, 1])
    paged = PagedBlocks(layers(), ids)
    ids.zero_()
    assert paged.ids.tolist() == [3, 1]


def test_other_pages_of_the_same_layers() -> None:
    paged = PagedBlocks(layers(), [3, 1]).at([5])
    assert paged.ids.tolist() == [5]
    with pytest.raises(SpecMismatchError, match=r"block_ids\[0\] is 10; expected a page from 0 to 9"):
        paged.at([10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": []}, "layers is empty"),
        ({"layers": torch.zeros(3, 4)}, "layers is a Tensor"),
        ({"layers": [1, 2]}, r"layers\[0\] is a int"),
        ({"layers": [*layers(), layers()[0].float()]}, r"layers\[3\] is .*float32.*layers\[0\] .*bfloat16"),
        ({"layers": [*layers(), layers((9, 2, 4, 2, 8))[0]]}, r"layers\[3\] is \(9, .*layers\[0\] \(10, "),
        ({"layers": [torch.zeros(4)]}, "at least one axis within a page"),
        ({"block_ids": [0, 10]}, r"block_ids\[1\] is 10; expected a page from 0 to 9"),
        ({"block_ids": [-1]}, r"block_ids\[0\] is -1"),
        ({"block_ids": [0.5]}, "block_ids is float64"),
        ({"block_ids": [[0, 1]]}, r"of shape \(1, 2\)"),
        ({"block_ids": [0, 1, 2], "pages_per_block": 2}, "a multiple of pages_per_block, 2"),
        ({"pages_per_block": 0}, "pages_per_block is 0"),
        ({"pages_per_block": True}, "pages_per_block is True"),
        ({"block_dim": 5}, "block_dim is 5"),
        ({"block_dim": "0"}, "block_dim is '0'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"layers": layers(), "block_ids": [0]} | arguments
    with pytest.raises(SpecMismatchError, match=message):
        PagedBlocks(values.pop("layers"), values.pop("block_ids"), **values)


def test_a_negative_block_dim_counts_from_the_end() -> None:
    assert accept(PagedBlocks(layers((2, 4, 2, 8, 10)), [9], block_dim=-1)) == 1


def test_separate_keys_and_values_make_the_same_layout() -> None:
    assert accept(PagedBlocks(layers((10, 4, 2, 8), n_layers=6), [0, 1])) == 2


def test_latents_without_a_head_axis() -> None:
    spec = BlockSpec(layers=3, kv=1, kv_heads=1, head_dim=16, block_tokens=4, dtype="bfloat16")
    assert accept(PagedBlocks(layers((10, 4, 16)), [0]), spec) == 1
    assert accept(PagedBlocks(layers((10, 2, 16)), [0, 1], pages_per_block=2), spec) == 1


@pytest.mark.parametrize(
    ("paged", "message"),
    [
        (PagedBlocks(layers((10, 2, 2, 4, 8)), [0]), "do not make LCND"),  # tokens and heads swapped
        (PagedBlocks(layers((10, 4, 2, 2, 8)), [0]), "do not make LCND"),
        (PagedBlocks(layers(n_layers=2), [0]), "a block takes 512 bytes"),
        (PagedBlocks([t.view(torch.float16) for t in layers()], [0]), "pages of float16; expected bfloat16"),
        (PagedBlocks(layers((10, 1, 2, 4, 2, 8)), [0, 1], pages_per_block=2), "a block takes 1536 bytes"),
        (PagedBlocks(layers((10, 1, 4, 2, 8)), [0, 1], pages_per_block=2), "do not make LCND"),  # joined along K/V
    ],
)
def test_pages_of_another_shape_are_refused(paged: PagedBlocks, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=message):
        accept(paged)


def test_tokens_cannot_be_joined_when_they_are_tensors_of_their_own() -> None:
    spec = BlockSpec(layers=1, kv_heads=2, head_dim=8, block_tokens=4, dtype="bfloat16", layout="NCLD")
    paged = PagedBlocks(layers((10, 2, 1, 2, 8), n_layers=4), [0])
    assert accept(paged, spec) == 1
    with pytest.raises(SpecMismatchError, match="do not make NCLD"):
        accept(PagedBlocks(layers((10, 2, 1, 2, 8), n_layers=2), [0, 1], pages_per_block=2), spec)


def test_the_count_must_be_the_keys() -> None:
    with pytest.raises(SpecMismatchError, match=r"holds 1 blocks of 2 pages, but the key has 3; give 6 block_ids"):
        rows_of(PagedBlocks(layers(), [0, 1], pages_per_block=2), SPEC, 3, argument="out")


def test_a_page_is_written_once() -> None:
    paged = PagedBlocks(layers(), [3, 1, 3])
    assert accept(paged) == 3
    with pytest.raises(SpecMismatchError, match="out names page 3 twice"):
        accept(paged, writable=True)


def test_pages_that_share_memory_are_not_written() -> None:
    expanded = [torch.zeros(1, 2, 4, 2, 8, dtype=torch.bfloat16).expand(10, 2, 4, 2, 8) for _ in range(3)]
    with pytest.raises(SpecMismatchError, match="an expanded tensor"):
        accept(PagedBlocks(expanded, [0, 1]), writable=True)
    with pytest.raises(SpecMismatchError, match="one tensor twice"):
        accept(PagedBlocks([layers()[0]] * 3, [0, 1]), writable=True)


def test_opaque_blocks_take_any_dtype_and_shape() -> None:
    odd = random_layers(2, (10, 3, 5), torch.float8_e4m3fn, 0)
    assert accept(PagedBlocks(odd, [1, 2]), opaque(odd)) == 2


def test_repr_tells_what_there_is() -> None:
    text = repr(PagedBlocks(layers(), [0, 1]))
    assert "2 blocks of 1 pages, 3 tensors (10, 2, 4, 2, 8) on cpu" in text
