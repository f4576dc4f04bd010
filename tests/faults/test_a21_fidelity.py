"""A21: every bit pattern of every dtype in every memory layout comes back as it was, and nothing else is stored."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kvstore import BlockSpec, BlockStatus, SpecMismatchError
from tests.faults.conftest import Rounds
from tests.faults.store import MIB, TIER, Store, over
from tests.support_faults import NAMESPACE, SMALL, noise, same, target, unrelated

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
PATTERNS = 1 << 16
CODECS = ["planes", "none", "zstd", "planes-base"]


def spec_of(dtype: str) -> BlockSpec:
    """Blocks of 65,536 elements, so that one holds every pattern of 16 bits."""
    return BlockSpec(layers=4, kv_heads=8, head_dim=64, block_tokens=16, dtype=dtype)


def contents(spec: BlockSpec) -> dict[str, torch.Tensor]:
    """Blocks by their bytes: NaN payloads, infinities, negative zeros and denormals among them."""
    every = torch.arange(PATTERNS, dtype=torch.int32).to(torch.uint16).view(torch.uint8)  # 128 KiB
    raw = {
        "every pattern": every.repeat(-(-spec.nbytes // every.numel()))[: spec.nbytes],
        "shuffled patterns": every.view(torch.uint16)
        .view(256, 256)
        .T.contiguous()
        .view(torch.uint8)
        .view(-1)
        .repeat(4)[: spec.nbytes],
        "zeros": torch.zeros(spec.nbytes, dtype=torch.uint8),
        "one byte": torch.full((spec.nbytes,), 0x7F, dtype=torch.uint8),
        "negative zeros": torch.tensor([0, 0x80], dtype=torch.uint8).repeat(spec.nbytes // 2),
        "noise": noise(spec, [21])[0].contiguous().view(torch.uint8).view(-1),
    }
    return {name: data.clone().view(spec.torch_dtype()).view(spec.shape) for name, data in raw.items()}


@over("LNTS")
def test_every_pattern_of_every_dtype_comes_back(store: Store, rounds: Rounds) -> None:
    codecs = CODECS if store.kind == "lmdb" else CODECS[: rounds(1, len(CODECS))]
    for codec, dtype in itertools.product(codecs, DTYPES):
        spec = spec_of(dtype)
        blocks = contents(spec)
        namespace = dataclasses.replace(NAMESPACE, revision=codec)
        with store.open(spec=spec, codec=codec, deadline=20.0, namespace=namespace) as cache:  # of a busy machine
            for i, block in enumerate(blocks.values()):
                cache.put(unrelated(i), [block])
            cache.flush(60)
            for i, (what, block) in enumerate(blocks.items()):
                found = cache.fetch(unrelated(i))
                assert found is not None, (codec, dtype, what)
                assert same(found[0], block), (codec, dtype, what)
                assert found.dtype is spec.torch_dtype()


@over("LNTS")
def test_a_block_of_another_dtype_or_shape_is_never_served(store: Store) -> None:
    spec = spec_of("bfloat16")
    others = [
        spec_of("float16"),
        dataclasses.replace(spec, layers=8, kv_heads=4),
        dataclasses.replace(spec, layout="NCLD"),
        dataclasses.replace(spec, dtype="int8", head_dim=128),
    ]
    block = noise(spec, [0])
    with store.open(spec=spec) as cache:
        cache.store(unrelated(0), block)
        for other in others:
            assert other.nbytes == spec.nbytes
            with store.open(spec=other) as reader:
                assert reader.fetch(unrelated(0)) is None
                assert reader.get_each(unrelated(0), target(other)) == [BlockStatus.ABSENT]
        found = cache.fetch(unrelated(0))
        assert found is not None
        assert same(found, block)


def layouts(block: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same block in other memory: what torch calls strides, offsets and views."""
    dims = list(range(block.ndim))
    transposed = block.permute(*dims[::-1]).contiguous().permute(*dims[::-1])
    every_second = torch.zeros((*block.shape[:-1], 2 * block.shape[-1]), dtype=block.dtype)[..., ::2]
    every_second.copy_(block)
    middle = torch.zeros((block.shape[0] + 2, *block.shape[1:]), dtype=block.dtype)[1:-1]
    middle.copy_(block)
    needs_grad = block.clone().requires_grad_()
    return {
        "contiguous": block,
        "transposed": transposed,
        "every second": every_second,
        "in the middle": middle,
        "requires grad": needs_grad,
        "detached graph": needs_grad * 1,
    }


@over("LNTS")
def test_every_memory_layout_comes_back(store: Store) -> None:
    block = torch.randn(SMALL.shape).to(torch.bfloat16)
    expanded = block[..., :1].expand(SMALL.shape)
    given = {**layouts(block), "expanded": expanded}
    with store.open() as cache:
        for i, tensor in enumerate(given.values()):
            cache.put(unrelated(i), [tensor])
        cache.flush(60)
        for i, (what, tensor) in enumerate(given.items()):
            found = cache.fetch(unrelated(i))
            assert found is not None, what
            assert same(found[0], tensor.detach().contiguous()), what
        for what, out in layouts(torch.zeros(SMALL.shape, dtype=torch.bfloat16)).items():
            if "gra" in what:
                continue
            assert cache.get(unrelated(0), [out]) == 1
            assert same(out.contiguous(), block), what


@over("LNTS")
def test_blocks_that_no_spec_has_are_refused_before_anything_is_stored(store: Store) -> None:
    wrong = [
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.zeros(0, dtype=torch.bfloat16),
        torch.zeros((0, *SMALL.shape), dtype=torch.bfloat16),
        torch.zeros((1, *SMALL.shape), dtype=torch.float16),
        torch.zeros((1, *SMALL.shape[:-1], SMALL.shape[-1] + 1), dtype=torch.bfloat16),
        torch.zeros((2, *SMALL.shape), dtype=torch.bfloat16),
    ]
    with store.open() as cache:
        for tensor in wrong:
            with pytest.raises(SpecMismatchError):
                cache.put(unrelated(0), tensor)
        cache.flush(10)
        assert cache.tier(TIER).counters.stored == 0
        assert store.places() == []
        cache.store(unrelated(0), noise(SMALL, [0]))
        assert cache.tier(TIER).counters.stored == 1


@over("LNTS")
def test_a_view_of_something_large_stores_the_view_alone(store: Store) -> None:
    marker = b"secret of a neighbour"
    large = torch.zeros(128 * MIB, dtype=torch.uint8)
    large.view(-1, 32)[:, : len(marker)] = torch.tensor(list(marker), dtype=torch.uint8)
    start = 64 * MIB
    inside = large[start : start + SMALL.nbytes]
    inside.copy_(noise(SMALL, [0]).view(torch.uint8).view(-1))
    view = inside.view(torch.bfloat16).view(SMALL.shape)
    with store.open(namespace=NAMESPACE) as cache:
        cache.store(unrelated(0), view[None])
        found = cache.fetch(unrelated(0))
        assert found is not None
        assert same(found[0], view)
        assert cache.tier(TIER).counters.stored_bytes <= SMALL.nbytes + 1024
    (place,) = store.places()
    assert len(store.read(place)) <= SMALL.nbytes + 1024
    assert bytes(inside[:64].tolist()) in store.read(place)
    assert not [path for path in store.root.rglob("*") if path.is_file() and marker in path.read_bytes()]
    assert marker not in store.read(place)
