"""Every codec gives back every bit of every block."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import Codec
from kvstore.record import RecordMeta
from kvstore.segments import plan_segments
from kvstore.spec import DTYPES, BlockSpec

LAYOUTS = ["LCND", "NCLD", "LCHND", "LNCD", "CLND", "NLCD", "CNLD"]
FLOATS_16 = ["bfloat16", "float16"]
ALL_PATTERNS = BlockSpec(layers=4, kv_heads=8, head_dim=64, block_tokens=16, dtype="bfloat16")


def specs() -> st.SearchStrategy[BlockSpec]:
    small = st.integers(1, 5)
    return st.builds(
        BlockSpec,
        layers=small,
        kv_heads=st.integers(1, 3),
        head_dim=st.sampled_from([1, 3, 4, 8, 17]),
        block_tokens=st.sampled_from([1, 2, 7, 8, 16, 33, 48]),
        dtype=st.sampled_from([name for name in DTYPES if name != "opaque"]),
        layout=st.sampled_from(LAYOUTS),
        kv=st.integers(1, 2),
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spec=specs(),
    codec=st.sampled_from(["none", "zstd", "planes", "planes-base"]),
    seed=st.integers(0, 2**32),
    symbols=st.sampled_from([1, 2, 5, 256]),
)
def test_any_spec_comes_back_bit_for_bit(trip: Any, spec: BlockSpec, codec: str, seed: int, symbols: int) -> None:
    """Few symbols let every codec pay, 256 let none."""
    rng = np.random.default_rng(seed)
    alphabet = rng.integers(0, 256, symbols, dtype=np.uint8)
    trip(spec, codec).codec_used(rng.choice(alphabet, spec.nbytes).tobytes())


@pytest.mark.parametrize("dtype", FLOATS_16)
def test_all_16_bit_patterns_come_back_through_the_planes(trip: Any, planes_name: str, dtype: str) -> None:
    spec = BlockSpec(layers=4, kv_heads=8, head_dim=64, block_tokens=16, dtype=dtype)
    patterns = np.arange(65536, dtype=np.uint16)
    assert spec.nbytes == patterns.nbytes
    by_channel = patterns.reshape(4, 2, 8, 64, 16).transpose(0, 1, 4, 2, 3)
    used = [trip(spec, planes_name).codec_used(p.tobytes()) for p in (patterns, patterns[::-1], by_channel)]
    assert set(used) == {2 if planes_name == "planes" else 3}


def test_all_16_bit_patterns_in_random_order_come_back(trip: Any, codec_name: str) -> None:
    patterns = np.random.default_rng(3).permutation(65536).astype(np.uint16)
    assert trip(ALL_PATTERNS, codec_name).codec_used(patterns.tobytes()) == 0  # nothing to gain


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("dtype", FLOATS_16)
def test_the_planes_codecs_really_work_in_every_layout(
    trip: Any, rng: random.Random, planes_name: str, layout: str, kv: int, dtype: str
) -> None:
    spec = BlockSpec(layers=3, kv_heads=3, head_dim=24, block_tokens=16, dtype=dtype, layout=layout, kv=kv)
    raw = bytes(b for _ in range(spec.nbytes // 2) for b in (rng.randrange(256), rng.choice((0x3F, 0x40, 0xBF))))
    assert trip(spec, planes_name).codec_used(raw) == (2 if planes_name == "planes" else 3)


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": 1, "kv_heads": 1, "head_dim": 300_000, "block_tokens": 1},  # one plane above a chunk
        {"layers": 2, "kv_heads": 2, "head_dim": 64, "block_tokens": 1500},  # items larger than a segment
        {"layers": 40, "kv_heads": 8, "head_dim": 128, "block_tokens": 16},  # several items in a segment
        {"layers": 5, "kv_heads": 8, "head_dim": 128, "block_tokens": 16},  # a short last segment
    ],
)
@pytest.mark.parametrize("layout", ["LCND", "NCLD", "CLND"])
def test_blocks_of_many_and_of_large_segments_come_back(
    trip: Any, codec_name: str, shape: dict[str, Any], layout: str
) -> None:
    spec = BlockSpec(**shape, dtype="bfloat16", layout=layout)
    words = np.random.default_rng(1).standard_normal(spec.nbytes // 2).astype(np.float32).view(np.uint32) >> 16
    used = trip(spec, codec_name).codec_used(words.astype(np.uint16).tobytes())
    assert used == ["none", "zstd", "planes", "planes-base"].index(codec_name)


def test_opaque_blocks_come_back(trip: Any, codec_name: str) -> None:
    spec = BlockSpec.opaque(1_000_003, block_tokens=16, tag="rows")
    raw = bytes(range(200)) * 5000 + b"end"
    assert trip(spec, codec_name).codec_used(raw) == (0 if codec_name == "none" else 1)


def test_a_segment_that_does_not_shrink_is_stored_raw_among_others(trip: Any, codec_name: str) -> None:
    """The first segment decides for the block; a later one that gains nothing goes raw alone."""
    spec = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=64, dtype="bfloat16")
    plan = plan_segments(spec)
    raw = bytearray(spec.nbytes)
    raw[plan[1].raw_offset : plan[2].raw_offset] = np.random.default_rng(2).bytes(plan[1].raw_bytes)
    encoded = trip(spec, codec_name).encode(bytes(raw))
    stored = [len(part) for part in encoded.buffers[1:]]
    if codec_name == "none":
        assert stored == [spec.nbytes]
    else:
        assert stored[1] == plan[1].raw_bytes
        assert all(stored[i] < plan[i].raw_bytes for i in (0, 2, 3))
    assert trip(spec, codec_name).decode(b"".join(encoded.buffers)) == raw


def test_a_first_segment_above_the_threshold_sends_the_block_raw(trip: Any, codec_name: str) -> None:
    spec = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=64, dtype="bfloat16")
    first = plan_segments(spec)[0].raw_bytes
    raw = np.random.default_rng(2).bytes(first) + bytes(spec.nbytes - first)
    encoded = trip(spec, codec_name).encode(raw)
    assert encoded.stored_raw
    assert encoded.codec_id == 0
    assert trip(spec, codec_name).decode(b"".join(encoded.buffers)) == raw


@pytest.mark.parametrize("codec_name", ["zstd", "planes", "planes-base"])
@pytest.mark.parametrize(("zero_tokens", "pays"), [(3, False), (16, True)])
def test_a_block_that_shrinks_by_less_than_a_twentieth_is_stored_raw(
    trip: Any, codec_name: str, zero_tokens: int, pays: bool
) -> None:
    spec = BlockSpec(layers=1, kv_heads=8, head_dim=128, block_tokens=64, dtype="bfloat16")
    block = np.frombuffer(np.random.default_rng(2).bytes(spec.nbytes), np.uint16).reshape(spec.shape).copy()
    block[:, :, :zero_tokens] = 0
    (geometry,) = plan_segments(spec)
    alone = trip.codecs[codec_name]().encode_segment(block.data.cast("B"), geometry)
    assert alone is not None
    assert (len(alone) <= 0.95 * spec.nbytes) is pays
    assert (trip(spec, codec_name).codec_used(block.tobytes()) != 0) is pays


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_the_header_names_the_codec_that_stood_in(trip: Any, planes_name: str, dtype: str) -> None:
    spec = BlockSpec(layers=4, kv_heads=4, head_dim=32, block_tokens=16, dtype=dtype)
    assert trip(spec, planes_name).codec_used(bytes(spec.nbytes)) == 1
    alone = BlockEncoder(spec, bytes(16), trip.codecs[planes_name]())
    assert alone.encode(memoryview(bytes(spec.nbytes)), RecordMeta(bytes(32))).codec_id == 0


def test_records_stay_valid_until_recycle(trip: Any, codec_name: str, real_blocks: Any) -> None:
    blocks = [block for spec, block in real_blocks("bf16*16tok*") for _ in range(3)]
    spec = real_blocks("bf16*16tok*")[0][0]
    journey = trip(spec, codec_name)
    for _ in range(2):
        encoded = [journey.encode(block.tobytes()) for block in blocks]
        records = [b"".join(e.buffers) for e in encoded]
        assert [journey.decode(record) for record in records] == [block.tobytes() for block in blocks]
        journey.encoder.recycle()


def test_an_open_block_outlives_later_ones_and_changes_threads(trip: Any, codec_name: str, real_blocks: Any) -> None:
    loaded = real_blocks("bf16*16tok*")
    spec = loaded[0][0]
    encoder = BlockEncoder(spec, bytes(16), trip.codecs[codec_name]())
    records = [b"".join(encoder.encode(block.data.cast("B"), RecordMeta(bytes(32))).buffers) for _, block in loaded]
    decoder = BlockDecoder(spec, bytes(16), lambda _: trip.codecs[codec_name]())
    opened = [decoder.open(memoryview(record), bytes(32)) for record in records]
    decoder.recycle()
    outs = [bytearray(spec.nbytes) for _ in loaded]
    threads = [
        threading.Thread(target=block.write_into, args=(memoryview(out),))
        for block, out in zip(opened, outs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outs == [block.tobytes() for _, block in loaded]


def test_threads_with_their_own_codecs_do_not_disturb_each_other(trip: Any, codec_name: str, real_blocks: Any) -> None:
    loaded = real_blocks("bf16*16tok*")
    wrong: list[int] = []

    def work(first: int) -> None:
        journey = trip(loaded[0][0], codec_name)
        for i in range(first, first + 12):
            raw = loaded[i % len(loaded)][1].tobytes()
            if journey.decode(b"".join(journey.encode(raw).buffers)) != raw:
                wrong.append(i)
            journey.encoder.recycle()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_encoding_reads_only_the_block(trip: Any, codec_name: str) -> None:
    """A view of larger memory: what lies around it is not stored."""
    spec = BlockSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=8, dtype="bfloat16")
    memory = b"MARKER" * 100 + bytes(spec.nbytes) + b"MARKER" * 100
    encoder = BlockEncoder(spec, bytes(16), trip.codecs[codec_name]())
    encoded = encoder.encode(memoryview(memory)[600 : 600 + spec.nbytes], RecordMeta(bytes(32)))
    assert encoded.nbytes <= spec.nbytes + 1024
    assert b"MARKER" not in b"".join(encoded.buffers)


def test_blocks_at_odd_addresses_come_back(trip: Any, codec_name: str, real_blocks: Any) -> None:
    spec, block = real_blocks("bf16_prose_b032*")[0]
    journey = trip(spec, codec_name)
    shifted = bytearray(1) + block.tobytes()
    encoded = journey.encoder.encode(memoryview(shifted)[1:], RecordMeta(bytes(32)))
    record = memoryview(b"\0" + b"".join(encoded.buffers))[1:]
    out = bytearray(spec.nbytes + 1)
    journey.decoder.open(record, bytes(32)).write_into(memoryview(out)[1:])
    assert out[1:] == block.tobytes()


@pytest.mark.parametrize("codec_class", ["planes", "planes-base"])
def test_a_codec_is_asked_for_once(trip: Any, codec_class: str, real_blocks: Any) -> None:
    asked: list[int] = []

    def find(codec_id: int) -> Codec:
        asked.append(codec_id)
        codec: Codec = trip.codecs[codec_class]()
        return codec

    spec, block = real_blocks("bf16_prose_b032*")[0]
    record = b"".join(trip(spec, codec_class).encode(block.tobytes()).buffers)
    decoder = BlockDecoder(spec, bytes(16), find)
    for _ in range(3):
        decoder.open(memoryview(record), bytes(32))
    assert len(asked) == 1
