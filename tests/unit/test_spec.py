"""Block specs: shape and size, what is refused, what the fingerprint tells apart."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.spec import DTYPES, LAYOUTS, OTHER_LAYOUT_ID, BlockSpec, dtype_name

BASE: dict[str, Any] = {"layers": 5, "kv_heads": 3, "head_dim": 64, "block_tokens": 16, "dtype": "bfloat16"}
TENSOR_DTYPES = [name for name in DTYPES if name != "opaque"]


@pytest.mark.parametrize(
    ("layout", "axes", "shape"),
    [
        ("LCND", "LCNHD", (5, 2, 16, 3, 64)),
        ("NCLD", "NCLHD", (16, 2, 5, 3, 64)),
        ("LCHND", "LCHND", (5, 2, 3, 16, 64)),
        ("LNCD", "LNCHD", (5, 16, 2, 3, 64)),
        ("CLND", "CLNHD", (2, 5, 16, 3, 64)),
        ("HLCND", "HLCND", (3, 5, 2, 16, 64)),
    ],
)
def test_layout_orders_the_shape(layout: str, axes: str, shape: tuple[int, ...]) -> None:
    spec = BlockSpec(**BASE, layout=layout)

    assert (spec.axes, spec.shape) == (axes, shape)
    assert spec.nbytes == math.prod(shape) * 2
    assert torch.empty(spec.shape, dtype=spec.torch_dtype()).nbytes == spec.nbytes
    assert spec.layout_id == LAYOUTS.get(layout, OTHER_LAYOUT_ID)


@pytest.mark.parametrize("name", TENSOR_DTYPES)
def test_dtype_may_be_given_by_name_or_by_torch(name: str) -> None:
    dtype = getattr(torch, name)
    spec = BlockSpec(**{**BASE, "dtype": dtype})

    assert spec == BlockSpec(**{**BASE, "dtype": name})
    assert spec.torch_dtype() == dtype
    assert (spec.dtype_id, spec.itemsize) == (DTYPES[name][0], dtype.itemsize)


@pytest.mark.parametrize("name", ["float64", "opaque", "", torch.int64, "bf16"])
def test_dtype_that_cannot_be_stored_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="cannot be stored; use one of bfloat16, float16"):
        dtype_name(name)


def test_stored_ids_are_for_life() -> None:
    assert {name: number for name, (number, _) in DTYPES.items()} == {
        "opaque": 0,
        "float32": 1,
        "float16": 2,
        "bfloat16": 3,
        "float8_e4m3fn": 4,
        "float8_e5m2": 5,
        "int8": 6,
        "uint8": 7,
    }
    assert LAYOUTS == {"opaque": 0, "LCND": 1, "NCLD": 2, "LCHND": 3, "LNCD": 4, "CLND": 5, "NLCD": 6, "CNLD": 7}


def test_mla_latents_have_one_instead_of_keys_and_values() -> None:
    assert BlockSpec(**BASE, kv=1).shape == (5, 1, 16, 3, 64)


def test_opaque_block_is_its_bytes() -> None:
    spec = BlockSpec.opaque(656, block_tokens=16, tag="fp8+scales")

    assert (spec.is_opaque, spec.shape, spec.nbytes, spec.itemsize, spec.axes) == (True, (656,), 656, 1, "D")
    assert (spec.dtype_id, spec.layout_id, spec.torch_dtype()) == (0, 0, torch.uint8)
    assert not BlockSpec(**BASE).is_opaque


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "block_tokens", "kv"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", None, 1 << 31])
def test_size_that_is_no_positive_integer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"BlockSpec.{name} is .*; expected an integer of at least 1"):
        BlockSpec(**{**BASE, name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": 3}, r"BlockSpec.kv is 3; expected 2 .* or 1"),
        ({"layout": "LCNHH"}, "layout 'LCNHH' is not valid"),
        ({"layout": "DLCN"}, "layout 'DLCN' is not valid; expected an order"),
        ({"layout": "LCN"}, "layout 'LCN' is not valid"),
        ({"layout": ""}, "layout '' is not valid"),
        ({"block_tokens": 1 << 24}, "one block .* bytes; expected less than 4294967296"),
        ({"layout": "opaque"}, r"an opaque spec needs a tag .*BlockSpec.opaque\(nbytes"),
    ],
)
def test_spec_that_describes_no_block_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSpec(**{**BASE, **change})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nbytes": 0}, "BlockSpec.opaque nbytes is 0"),
        ({"nbytes": True}, "BlockSpec.opaque nbytes is True"),
        ({"nbytes": 1 << 31}, "BlockSpec.opaque nbytes is 2147483648"),
        ({"block_tokens": 0}, "BlockSpec.opaque block_tokens is 0"),
        ({"tag": ""}, "an opaque spec needs a tag"),
    ],
)
def test_opaque_spec_that_describes_no_block_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSpec.opaque(**{"nbytes": 8, "block_tokens": 16, "tag": "t", **arguments})


def test_spec_is_an_immutable_value() -> None:
    spec = BlockSpec(**BASE)

    assert spec == BlockSpec(**BASE)
    assert hash(spec) == hash(BlockSpec(**BASE))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.layers = 6  # type: ignore[misc]  # the point of the test


def test_fingerprints_tell_apart_specs_of_equal_size() -> None:
    layouts = ["".join(axes) + "D" for axes in itertools.permutations("LCNH")]
    specs = [BlockSpec(**BASE, layout=layout) for layout in layouts]
    specs += [BlockSpec(**{**BASE, "dtype": dtype}) for dtype in TENSOR_DTYPES if dtype != "bfloat16"]
    specs += [BlockSpec(**{**BASE, "kv_heads": 6, "kv": 1}), BlockSpec(**{**BASE, "layers": 3, "kv_heads": 5})]
    specs += [BlockSpec.opaque(specs[0].nbytes, block_tokens=16, tag=tag) for tag in ("a", "b")]
    specs += [BlockSpec.opaque(specs[0].nbytes, block_tokens=32, tag="a")]

    assert len({spec.fingerprint() for spec in specs}) == len(specs)
    assert {len(spec.fingerprint()) for spec in specs} == {16}


def test_short_and_long_name_of_a_layout_are_one_fingerprint() -> None:
    assert BlockSpec(**BASE, layout="LCND").fingerprint() == BlockSpec(**BASE, layout="LCNHD").fingerprint()


@given(st.lists(st.tuples(*[st.integers(1, 30)] * 4), min_size=2, max_size=2, unique=True))
def test_other_sizes_have_other_fingerprints(sizes: list[tuple[int, int, int, int]]) -> None:
    a, b = (BlockSpec(layers=n[0], kv_heads=n[1], head_dim=n[2], block_tokens=n[3], dtype="int8") for n in sizes)

    assert a.fingerprint() != b.fingerprint()


def test_spec_needs_no_torch() -> None:
    code = "import sys; from kvstore.spec import BlockSpec as B; B.opaque(8, block_tokens=1, tag='t').fingerprint(); print('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
