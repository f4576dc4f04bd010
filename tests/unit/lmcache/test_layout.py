"""What a chunk's bytes are, as a tag and as a header."""

from __future__ import annotations

import pytest
import torch
from kvstore_lmcache.layout import HEADER_BYTES, ChunkLayout, dtype_of

HYBRID = ChunkLayout.of([(2, 3, 16, 32), (1, 2, 16, 8)], [torch.bfloat16, torch.float8_e4m3fn], "KV_2LTD")


def test_a_layout_counts_the_bytes_of_all_parts() -> None:
    assert HYBRID.nbytes == 2 * 3 * 16 * 32 * 2 + 2 * 16 * 8


def test_a_header_gives_back_the_layout() -> None:
    header = HYBRID.to_header()

    assert len(header) == HEADER_BYTES
    assert ChunkLayout.from_header(header) == HYBRID


@pytest.mark.parametrize(
    "other",
    [
        ChunkLayout.of([(2, 3, 16, 32)], [torch.bfloat16], "KV_2LTD"),
        ChunkLayout.of([(2, 3, 16, 32), (1, 2, 16, 8)], [torch.float16, torch.float8_e4m3fn], "KV_2LTD"),
        ChunkLayout.of([(3, 2, 16, 32), (1, 2, 16, 8)], [torch.bfloat16, torch.float8_e4m3fn], "KV_2LTD"),
        ChunkLayout.of([(2, 3, 16, 32), (1, 2, 16, 8)], [torch.bfloat16, torch.float8_e4m3fn], "KV_MLA_FMT"),
        ChunkLayout.of([(2, 3, 16, 32), (1, 2, 16, 8)], [torch.bfloat16, torch.float8_e4m3fn]),
    ],
)
def test_layouts_that_differ_have_different_tags(other: ChunkLayout) -> None:
    assert other.tag != HYBRID.tag


@pytest.mark.parametrize(
    ("fmt", "shape", "layout", "block_tokens"),
    [
        ("KV_2LTD", (2, 3, 16, 32), "CLND", 16),
        ("", (2, 3, 16, 32), "CLND", 16),
        ("KV_MLA_FMT", (1, 3, 16, 576), "CLND", 16),
        ("KV_T2D", (16, 2, 32), "LNCD", 16),
        ("KV_2TD", (2, 16, 32), "LCND", 16),
        ("KV_MLA_FMT", (16, 576), "LCND", 16),
    ],
)
def test_a_known_order_gives_codecs_dtype_and_axes(
    fmt: str, shape: tuple[int, ...], layout: str, block_tokens: int
) -> None:
    chunk = ChunkLayout.of([shape], [torch.bfloat16], fmt)

    form = chunk.form(256)

    assert (form.spec.layout.replace("H", ""), form.spec.dtype) == (layout, "bfloat16")
    assert form.spec.block_tokens == block_tokens
    assert [n for n in form.spec.shape if n > 1] == [n for n in shape if n > 1]
    assert form.spec.nbytes == chunk.nbytes
    assert form.tag == chunk.tag


@pytest.mark.parametrize(
    "layout",
    [
        HYBRID,
        ChunkLayout.of([(3, 2, 16, 32)], [torch.bfloat16], "KV_2LTD"),
        ChunkLayout.of([(2, 3, 16, 32)], [torch.int64], "KV_2LTD"),
        ChunkLayout.of([(2, 3, 16, 32)], [torch.bfloat16], "BINARY"),
        ChunkLayout.of([(1000,)], [torch.uint8], ""),
    ],
)
def test_any_other_chunk_is_opaque(layout: ChunkLayout) -> None:
    spec = layout.form(256).spec

    assert spec.is_opaque
    assert (spec.nbytes, spec.block_tokens) == (layout.nbytes, 256)


def test_a_described_chunk_has_room_for_header_and_whole_chunk() -> None:
    form = HYBRID.described_form(256)

    assert form.spec.nbytes == HEADER_BYTES + HYBRID.nbytes
    assert form.tag != HYBRID.form(256).tag


@pytest.mark.parametrize(
    "header",
    [b"", b"\0" * HEADER_BYTES, b"{}", b'{"fmt":"X"}', b'{"fmt":"X","parts":[["nn",[1]]]}', b'{"fmt":"X","parts":3}',
     b'{"fmt":"X","parts":[["int8",[-1]]]}', b"\xff" * HEADER_BYTES],
)  # fmt: skip
def test_bytes_that_are_no_header_are_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="is no chunk header"):
        ChunkLayout.from_header(header)


def test_a_layout_too_long_for_a_header_is_refused() -> None:
    parts = ChunkLayout(tuple(("bfloat16", (2, i, 16, 32)) for i in range(1, 400)))

    with pytest.raises(ValueError, match="399 parts"):
        parts.to_header()


def test_a_name_that_is_no_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'nn' is no dtype"):
        dtype_of("nn")
