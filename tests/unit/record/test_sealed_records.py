"""What a sealing codec is promised, and what a sealed record may be."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import xxhash

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import MAX_SEAL_BYTES, Codec, OpenSegment
from kvstore.errors import ConfigError, CorruptRecordError, PluginError
from kvstore.keyring import Keyring, SecretKey
from kvstore.record import RecordMeta, parse_head, verify_record
from kvstore.record_tags import RecordTags
from kvstore.segments import SegmentGeometry
from kvstore.spec import BlockSpec

SEGMENTED = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=64, dtype="bfloat16")  # 4 segments


class _Written(OpenSegment):
    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def write_into(self, out: memoryview) -> None:
        out[:] = self.raw


class Backwards(Codec):
    """Seals by turning segments round; the same length, plus ``extra`` bytes."""

    codec_id = 91
    name = "backwards"
    seals: ClassVar[bool] = True

    def __init__(self, extra: int = 0) -> None:
        self.extra = extra
        self.calls: list[Any] = []

    def begin(self, namespace: bytes, digest: bytes) -> None:
        self.calls.append((namespace, digest))

    def supports(self, spec: BlockSpec) -> bool:
        return not spec.is_opaque

    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> bytes | None:
        assert raw.readonly
        self.calls.append(geometry.first_item)
        return bytes(raw)[::-1] + bytes(self.extra)

    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> OpenSegment:
        self.calls.append(geometry.first_item)
        return _Written(bytes(stored)[: geometry.raw_bytes][::-1])


class InTheClear(Backwards):
    """The same codec as it would be if it did not seal."""

    seals = False


def made(bench: Any, codec: Codec, spec: BlockSpec | None = None, **meta: Any) -> bytes:
    spec = spec or bench.spec
    encoder = BlockEncoder(spec, bench.namespace, codec)
    record = encoder.encode(memoryview(bench.raw(spec)), RecordMeta(**{"digest": bench.digest, **meta}))
    return b"".join(record.buffers)


def reader(bench: Any, codec: Codec | None, spec: BlockSpec | None = None) -> BlockDecoder:
    return BlockDecoder(spec or bench.spec, bench.namespace, {91: codec}.get)


def read(bench: Any, codec: Codec, record: bytes, spec: BlockSpec | None = None) -> bytes:
    out = bytearray((spec or bench.spec).nbytes)
    reader(bench, codec, spec).open(memoryview(record), bench.digest).write_into(memoryview(out))
    return bytes(out)


def reason(attempt: Callable[..., object], *args: Any) -> str:
    with pytest.raises(CorruptRecordError) as caught:
        attempt(*args)
    return caught.value.reason


@pytest.mark.parametrize("extra", [0, 1, 40, MAX_SEAL_BYTES])
def test_a_sealed_record_comes_back_whatever_its_segments_take(bench: Any, extra: int) -> None:
    """Also when a segment takes just as many bytes sealed as raw, which means raw everywhere else."""
    raw, codec = bench.raw(SEGMENTED), Backwards(extra)
    record = made(bench, codec, SEGMENTED)
    head = verify_record(memoryview(record))
    assert (head.flags, head.sealed, head.codec_id, head.n_segments) == (8, True, 91, 4)
    assert len(record) == 192 + 16 * 4 + len(raw) + 4 * extra
    assert read(bench, codec, record, SEGMENTED) == raw
    layers = reader(bench, codec, SEGMENTED)
    table = layers.open_head(memoryview(record)[: head.head_bytes], bench.digest)
    out = bytearray(len(raw) // 4)
    layers.open_segment(table, 2, memoryview(record)[slice(*table.spans[2])]).write_into(memoryview(out))
    assert out == raw[len(raw) // 2 : len(raw) // 4 * 3]


def test_a_sealing_codec_is_told_the_block_before_its_segments(bench: Any) -> None:
    items = [0, 1, 2, 3]
    codec, begun = Backwards(), (bench.namespace, bench.digest)
    record = made(bench, codec, SEGMENTED)
    assert codec.calls == [begun, *items]
    codec.calls.clear()
    read(bench, codec, record, SEGMENTED)
    assert codec.calls == [begun, *items]
    layers = reader(bench, codec, SEGMENTED)
    table = layers.open_head(memoryview(record)[: 192 + 64], bench.digest)
    for index in (3, 1):
        codec.calls.clear()
        layers.open_segment(table, index, memoryview(record)[slice(*table.spans[index])])
        assert codec.calls == [begun, index]


def test_token_ids_are_not_written_into_a_sealed_record(bench: Any) -> None:
    ids = bytes(range(100, 132))
    record = made(bench, Backwards(), token_ids=ids)
    assert ids not in record
    assert not parse_head(memoryview(record)).has_token_ids
    assert ids in made(bench, InTheClear(), token_ids=ids)
    with pytest.raises(ValueError, match="8 tokens needs 4 each"):
        made(bench, Backwards(), token_ids=ids[4:])


def test_a_sealing_codec_that_seals_nothing_stores_nothing(bench: Any) -> None:
    class Shy(Backwards):
        def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> bytes | None:
            return None

    class Empty(Backwards):
        def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> bytes | None:
            return b""

    for codec in (Shy(), Empty(), Backwards(MAX_SEAL_BYTES + 1)):
        with pytest.raises(PluginError, match=r"seals 1024 bytes into .*; the block is not stored"):
            made(bench, codec)


def test_no_other_codec_takes_the_place_of_a_sealing_one(bench: Any) -> None:
    spec = BlockSpec.opaque(1000, block_tokens=8, tag="t")
    with pytest.raises(ConfigError, match="codec 'backwards' cannot seal blocks"):
        BlockEncoder(spec, bench.namespace, Backwards(), fallback=bench.codec(1))
    BlockEncoder(spec, bench.namespace, InTheClear(), fallback=bench.codec(1))


def test_the_flag_and_the_codec_must_agree(bench: Any) -> None:
    sealed, plain = made(bench, Backwards()), bench.layout.patch(bench.record(bench.raw()), "codec", 91)
    assert read(bench, Backwards(), sealed) == bench.raw()
    unsealed = bench.layout.seal(bench.layout.patch(sealed, "flags", 0))
    for record in (unsealed, bench.layout.seal(plain)):
        assert read(bench, InTheClear(), record) is not None
        assert reason(read, bench, Backwards(), record) == "codec"
    assert reason(lambda: read(bench, InTheClear(), sealed)) == "codec"
    by_none = bench.layout.seal(bench.layout.patch(sealed, "codec", 0))
    assert reason(lambda: read(bench, Backwards(), by_none)) == "codec"
    start = memoryview(sealed)[:208]
    layers = reader(bench, InTheClear())
    table = layers.open_head(start, bench.digest)
    assert reason(lambda: layers.open_segment(table, 0, memoryview(sealed)[208:])) == "codec"
    assert reason(lambda: reader(bench, None).open(memoryview(sealed), bench.digest)) == "codec"


def test_a_sealed_record_with_token_ids_or_overlong_segments_is_refused(bench: Any) -> None:
    layout, raw = bench.layout, bench.raw()
    with_ids = layout.patch(bench.record(raw, token_ids=bytes(32)), "flags", 10)
    assert reason(lambda: read(bench, Backwards(), layout.seal(with_ids))) == "version"
    sealed = made(bench, Backwards())
    longest = layout.forge(sealed, [raw[::-1] + bytes(MAX_SEAL_BYTES)])
    assert read(bench, Backwards(), longest) == raw
    assert reason(lambda: read(bench, Backwards(), layout.forge(sealed, [raw + bytes(MAX_SEAL_BYTES + 1)]))) == "length"
    unflagged = layout.seal(layout.patch(longest, "flags", 0))
    assert reason(lambda: read(bench, InTheClear(), unflagged)) == "length"
    assert reason(lambda: read(bench, Backwards(), layout.forge(sealed, [raw], [0]))) == "length"


def test_sealing_and_keying_go_together(bench: Any) -> None:
    tags = RecordTags(Keyring([SecretKey(1, b"k" * 32)]), bench.namespace)
    encoder = BlockEncoder(SEGMENTED, bench.namespace, Backwards(9), tags=tags)
    raw = bench.raw(SEGMENTED)
    record = bytearray(b"".join(encoder.encode(memoryview(raw), RecordMeta(bench.digest)).buffers))
    assert parse_head(memoryview(record)).flags == 12
    decoder = BlockDecoder(SEGMENTED, bench.namespace, {91: Backwards(9)}.get, tags=tags)
    out = bytearray(len(raw))
    decoder.open(memoryview(record), bench.digest).write_into(memoryview(out))
    assert out == raw
    record[-1] ^= 1  # an extra byte that the codec does not look at, with every checksum right
    last = memoryview(record)[-(len(raw) // 4 + 9) :]
    struct.pack_into("<Q", record, 192 + 3 * 32 + 8, xxhash.xxh3_64_intdigest(last))
    table = bytes(record[192 : 192 + 4 * 32])
    struct.pack_into("<Q", record, 184, xxhash.xxh3_64_intdigest(bytes(record[:184]) + bytes(8) + table))
    verify_record(memoryview(record))
    assert reason(lambda: decoder.open(memoryview(record), bench.digest)) == "tag"
