"""Bytes or miss: damaged, exchanged and foreign records, callers that reuse their buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore import BlockSpec, BlockStatus, KVCache, Namespace
from kvstore.memory_backend import MemoryBackend
from tests import doubles
from tests.support import MakeKey, blocks_of, same_bytes


class Rig:
    """A cache without L1 over one memory backend whose records can be edited behind its back."""

    def __init__(self, spec: BlockSpec, namespace: Namespace, codec: str = "none") -> None:
        self.backend = MemoryBackend()
        registry, name = doubles.register(lambda: self.backend)
        config = {"l1": {"enabled": False}, "l2": [{"backend": name, "codec": codec}]}
        self.cache = KVCache.open(config, spec=spec, namespace=namespace, registry=registry)

    def records(self) -> dict[bytes, bytes]:
        return {name: data for name, (data, _) in self.backend._records.items()}

    def edit(self, name: bytes, data: bytes) -> None:
        self.backend._records[name] = (data, 0.0)

    def named(self, digest: bytes) -> bytes:
        return next(name for name in self.backend._records if name.endswith(digest))


@pytest.fixture
def rig(spec: BlockSpec, namespace: Namespace) -> Any:
    made = Rig(spec, namespace)
    yield made
    made.cache.close()


def test_exchanged_records_are_misses_and_are_dropped(rig: Rig, spec: BlockSpec, make_key: MakeKey) -> None:
    first, second = make_key(1, seed=1), make_key(1, seed=2)
    blocks = blocks_of(spec, 2)
    rig.cache.put(first, blocks[:1])
    rig.cache.put(second, blocks[1:])
    rig.cache.flush(10)
    a, b = rig.named(first[0]), rig.named(second[0])
    stored = rig.records()
    rig.edit(a, stored[b])
    rig.edit(b, stored[a])
    out = torch.zeros_like(blocks[:1])

    assert rig.cache.get(first, out) == 0
    assert rig.cache.get_each(second, out) == [BlockStatus.MISMATCH]

    assert rig.cache.stats().tiers[0].counters.key_mismatch == 2
    assert rig.cache.lookup(first).blocks == rig.cache.lookup(second).blocks == 0
    rig.cache.put(first, blocks[:1])
    rig.cache.flush(10)
    assert rig.cache.get(first, out) == 1
    assert same_bytes(out, blocks[:1])


def test_a_record_of_another_namespace_is_a_miss(rig: Rig, spec: BlockSpec, make_key: MakeKey) -> None:
    other = Rig(spec, Namespace(model="test/model", revision="r2"))
    key, blocks = make_key(1), blocks_of(spec, 1)
    for one in (rig, other):
        one.cache.put(key, blocks)
        one.cache.flush(10)
    assert rig.records().keys() != other.records().keys()
    rig.edit(rig.named(key[0]), next(iter(other.records().values())))

    assert rig.cache.get(key, torch.zeros_like(blocks)) == 0
    assert rig.cache.stats().tiers[0].counters.key_mismatch == 1
    other.cache.close()


@pytest.mark.parametrize("codec", ["none", "planes", "zstd"])
def test_any_flipped_bit_is_a_miss(spec: BlockSpec, namespace: Namespace, make_key: MakeKey, codec: str) -> None:
    rig = Rig(spec, namespace, codec)
    gauss = torch.randn((1, *spec.shape), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    key = make_key(1)
    rig.cache.put(key, gauss)
    rig.cache.flush(10)
    name = rig.named(key[0])
    good = rig.records()[name]
    rng = np.random.default_rng(0)
    out = torch.full_like(gauss, 7.0)
    untouched = out.clone()

    for bit in [*range(0, 192 * 8, 7), *rng.integers(0, len(good) * 8, 300).tolist()]:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        rig.edit(name, bytes(bad))
        assert rig.cache.get(key, out) == 0, f"bit {bit} went unnoticed"
        assert same_bytes(out, untouched)
        assert rig.cache.lookup(key).blocks == 0

    rig.edit(name, good)
    assert rig.cache.get(key, out) == 1
    assert same_bytes(out, gauss)
    rig.cache.close()


def test_every_wrong_length_is_a_miss(rig: Rig, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(1), blocks_of(spec, 1)
    rig.cache.put(key, blocks)
    rig.cache.flush(10)
    name = rig.named(key[0])
    good = rig.records()[name]
    n = len(good)
    out = torch.zeros_like(blocks)

    lengths = [good[:k] for k in (0, 1, 191, 192, 193, 207, n - 1)]
    for bad in [*lengths, good + b"\0", good + good, good[:-4096] + bytes(4096), bytes(n)]:
        rig.edit(name, bad)
        assert rig.cache.get(key, out) == 0, f"length {len(bad)}"
        assert rig.cache.lookup(key).blocks == 0
    rig.cache.put(key, blocks)
    rig.cache.flush(10)
    assert rig.cache.get(key, out) == 1


def test_a_bad_block_ends_the_prefix_and_names_its_class(rig: Rig, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(10), blocks_of(spec, 10)
    rig.cache.put(key, blocks)
    rig.cache.flush(10)
    name = rig.named(key[3])
    rig.edit(name, rig.records()[name][:-1] + b"\x55")
    out = torch.full_like(blocks, 7.0)
    untouched = out.clone()

    statuses = rig.cache.get_each(key, out)
    assert statuses == [BlockStatus.CORRUPT if i == 3 else BlockStatus.DELIVERED for i in range(10)]
    assert same_bytes(out[3], untouched[3])

    again = untouched.clone()
    assert rig.cache.get(key, again) == 3
    assert same_bytes(again[3:], untouched[3:])
    rig.cache.put(key[3:4], blocks[3:4])
    rig.cache.flush(10)
    assert rig.cache.get(key, again) == 10
    assert same_bytes(again, blocks)


def test_put_snapshots_before_it_returns(spec: BlockSpec, namespace: Namespace, make_key: MakeKey) -> None:
    for l1 in ({"enabled": False}, {"capacity": "4MiB"}):
        backend = doubles.GatedWrites()
        registry, name = doubles.register(lambda backend=backend: backend)  # type: ignore[misc]
        config = {"l1": l1, "l2": [{"backend": name}]}
        cache = KVCache.open(config, spec=spec, namespace=namespace, registry=registry)
        backend.gate.clear()
        key, blocks = make_key(4), blocks_of(spec, 4)
        mine = blocks.clone()

        cache.put(key, mine)
        mine.fill_(7)
        backend.gate.set()
        cache.flush(10)
        out = torch.zeros_like(blocks)

        assert cache.get(key, out) == 4
        assert same_bytes(out, blocks)
        out.fill_(9)
        again = torch.zeros_like(blocks)
        assert cache.get(key, again) == 4
        assert same_bytes(again, blocks)
        cache.close()


DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]


@pytest.mark.parametrize("codec", ["auto", "none", "zstd", "planes", "planes-base"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(namespace: Namespace, dtype: str, codec: str) -> None:
    from kvstore import KVCacheKey

    spec = BlockSpec(layers=2, kv_heads=2, head_dim=64, block_tokens=16, dtype=dtype)
    gauss = torch.randn((2, *spec.shape), generator=torch.Generator().manual_seed(1))
    quiet = (gauss * 20).to(torch.int8).view(torch.uint8) if spec.itemsize == 1 else gauss.to(spec.torch_dtype())
    raw = [t.reshape(-1).view(torch.uint8) for t in (blocks_of(spec, 2), quiet)] + [torch.zeros(spec.nbytes).byte()]
    blocks = torch.cat(raw).view(spec.torch_dtype()).view(5, *spec.shape)
    rig = Rig(spec, namespace, codec)
    key = KVCacheKey.from_tokens(range(16 * 5), block_tokens=16)
    rig.cache.put(key, blocks)
    rig.cache.flush(10)
    out = torch.zeros_like(blocks.view(torch.uint8)).fill_(7).view(blocks.dtype)

    assert rig.cache.get(key, out) == 5
    assert same_bytes(out, blocks)
    rig.cache.close()


def test_all_16_bit_patterns_survive(namespace: Namespace) -> None:
    from kvstore import KVCacheKey

    spec = BlockSpec(layers=4, kv_heads=8, head_dim=64, block_tokens=16, dtype="bfloat16")
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(1, *spec.shape)
    key = KVCacheKey.from_tokens(range(16), block_tokens=16)
    for codec in ("none", "zstd", "planes", "planes-base"):
        rig = Rig(spec, namespace, codec)
        rig.cache.put(key, every)
        rig.cache.flush(10)
        out = torch.zeros_like(every)
        assert rig.cache.get(key, out) == 1
        assert same_bytes(out, every)
        rig.cache.close()


def test_views_of_any_strides_are_stored_by_their_content(rig: Rig, spec: BlockSpec, make_key: MakeKey) -> None:
    big = blocks_of(BlockSpec(8, 4, 64, 32, "bfloat16"), 2)
    strided = big[:, ::2, :, ::2, ::2]
    shuffled = blocks_of(spec, 2).transpose(2, 3).contiguous().transpose(2, 3)
    expanded = blocks_of(spec, 1).expand(2, *spec.shape)
    for seed, blocks in enumerate((strided, shuffled, expanded)):
        assert not blocks.is_contiguous()
        key = make_key(2, seed=seed)
        rig.cache.put(key, blocks)
        rig.cache.flush(10)
        out = torch.zeros((2, *spec.shape), dtype=torch.bfloat16)
        assert rig.cache.get(key, out) == 2
        assert same_bytes(out, blocks.contiguous())
    assert all(len(record) < spec.nbytes + 1024 for record in rig.records().values())


def test_a_strided_destination_is_filled_by_its_content(rig: Rig, spec: BlockSpec, make_key: MakeKey) -> None:
    key, blocks = make_key(3), blocks_of(spec, 3)
    rig.cache.put(key, blocks)
    rig.cache.flush(10)
    room = torch.zeros((3, 2, *spec.shape), dtype=torch.bfloat16)

    assert rig.cache.get(key, room[:, 1]) == 3

    assert same_bytes(room[:, 1].contiguous(), blocks)
    assert not room[:, 0].any()


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_large_reads_in_several_threads_stop_at_a_bad_block(
    namespace: Namespace, make_key: MakeKey, codec: str
) -> None:
    backend = MemoryBackend()
    registry, name = doubles.register(lambda: backend)
    spec = BlockSpec(layers=16, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
    n = 48  # 6 MiB in blocks of 128 KiB, more than a single thread is left with
    config = {
        "l1": {"capacity": "16MiB"},
        "l2": [{"backend": name, "codec": codec, "workers": 3, "queue": "16MiB"}],
    }
    key = make_key(n)
    gauss = torch.randn((n, *spec.shape), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    with KVCache.open(config, spec=spec, namespace=namespace, registry=registry) as cache:
        cache.put(key, gauss)
        cache.flush(20)
        assert cache._state is not None
        l1, tier = cache._state.stack.l1, cache._state.stack.tiers[0].tier
        assert l1 is not None
        l1.clear()
        with cache.acquire(key) as lease:
            assert all(same_bytes(t, b) for t, b in zip(lease.tensors, gauss, strict=True))
        assert len(tier.workers._threads) == 3
        assert tier.decoding == (codec != "none")
        l1.clear()
        bad = next(stored for stored in backend._records if stored.endswith(key[30]))
        data = bytearray(backend._records[bad][0])
        data[-1] ^= 1
        backend._records[bad] = (bytes(data), 0.0)
        out = torch.full_like(gauss, 7.0)

        assert cache.get(key, out) == 30
        assert same_bytes(out[:30], gauss[:30])
        assert same_bytes(out[30:], torch.full_like(gauss[30:], 7.0))
        assert cache.acquire(key).blocks == 30
        assert cache.stats().tiers[0].counters.corrupt == 1
