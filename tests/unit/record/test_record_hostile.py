from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.errors import CorruptRecordError
from kvstore.record import RecordMeta, parse_head, verify_record
from kvstore.spec import BlockSpec

BOMB = bytes.fromhex("28b52ffde06c06060663636363")  # 13 bytes that declare 7.2e18
QUIET = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def reason_of(bench: Any, record: bytes) -> str:
    with pytest.raises(CorruptRecordError) as caught:
        bench.read(record)
    return str(caught.value.reason)


def test_every_flipped_bit_is_noticed(bench: Any, codec_name: str) -> None:
    record = bench.record(bench.raw(), codec_name, token_ids=bytes(32))
    for position in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptRecordError):
            bench.decoder.open(memoryview(damaged), bench.digest)
        with pytest.raises(CorruptRecordError):
            verify_record(memoryview(damaged))


def test_every_wrong_length_is_noticed(bench: Any, codec_name: str) -> None:
    record = bench.record(bench.raw(), codec_name)
    n = len(record)
    for length in (0, 1, 191, 192, 193, 207, 208, 209, n - 1):
        assert reason_of(bench, record[:length]) == "length"
    assert reason_of(bench, record + b"\0") == "length"
    assert reason_of(bench, record + record) == "length"
    assert reason_of(bench, bytes(n)) == "magic"
    assert reason_of(bench, record[:-64] + bytes(64)) == "checksum"
    assert reason_of(bench, record[: -n // 2] + bytes(n // 2)) in {"length", "checksum"}


@pytest.mark.parametrize(
    ("field", "value", "reasons"),
    [
        ("magic", b"KVB\x02", ("magic", "magic")),
        ("format_version", 0, ("version", "version")),
        ("format_version", 2, ("version", "version")),
        ("flags", 8, ("checksum", "codec")),
        ("flags", 10, ("version", "version")),
        ("flags", 16, ("version", "version")),
        ("flags", 2, ("length", "length")),
        ("header_len", 0, ("length", "length")),
        ("header_len", 65535, ("length", "length")),
        ("n_segments", 0, ("length", "length")),
        ("n_segments", 2**32 - 1, ("length", "length")),
        ("raw_len", 0, ("length", "length")),
        ("raw_len", 2**63, ("length", "length")),
        ("raw_len", 2**64 - 1, ("length", "length")),
        ("raw_len", 256, ("length", "length")),
        ("stored_len", 0, ("length", "length")),
        ("stored_len", 2**64 - 1, ("length", "length")),
        ("codec", 63, ("checksum", "codec")),
        ("codec", 65535, ("checksum", "codec")),
        ("dtype", 255, ("checksum", "spec")),
        ("layout", 255, ("checksum", "spec")),
        ("fingerprint", b"f" * 16, ("checksum", "spec")),
        ("block_tokens", 2**32 - 1, ("checksum", "spec")),
        ("namespace", b"n" * 16, ("checksum", "key")),
        ("digest", b"d" * 32, ("checksum", "key")),
        ("zero", b"\1" * 16, ("checksum", "version")),
        ("tag", b"\1" * 16, ("checksum", "version")),
    ],
)
def test_a_wrong_field_is_named_with_and_without_the_right_checksum(
    bench: Any, codec_name: str, field: str, value: Any, reasons: tuple[str, str]
) -> None:
    changed = bench.layout.patch(bench.record(bench.raw(), codec_name), field, value)
    assert reason_of(bench, changed) == reasons[0]
    if bench.layout.read(changed, "n_segments") == 1:
        assert reason_of(bench, bench.layout.seal(changed)) == reasons[1]


def test_swapped_records_are_the_wrong_key(bench: Any) -> None:
    record = bench.record(bench.raw(), digest=b"0" * 32)
    with pytest.raises(CorruptRecordError, match="asked for") as caught:
        bench.read(record, b"1" * 32)
    assert caught.value.reason == "key"


def test_a_sound_record_of_another_spec_is_named_so(bench: Any) -> None:
    record = memoryview(bench.record(bench.raw()))
    for other in (
        BlockSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=8, dtype="float16"),
        BlockSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=8, dtype="bfloat16", layout="NCLD"),
        BlockSpec(layers=4, kv_heads=2, head_dim=8, block_tokens=8, dtype="bfloat16"),
        BlockSpec(layers=64, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16"),
        BlockSpec.opaque(bench.spec.nbytes, block_tokens=8, tag="t"),
    ):
        with pytest.raises(CorruptRecordError) as caught:
            BlockDecoder(other, bench.namespace, bench.codec).open(record, bench.digest)
        assert caught.value.reason == "spec"


def test_a_keyed_record_is_a_clean_miss(bench: Any) -> None:
    """Version 1 has room for keyed tags: 32-byte table entries and the header's tag."""
    plain = bench.record(bench.raw())
    head = bench.layout.patch(bench.layout.patch(plain[:192], "flags", 4), "tag", b"t" * 16)
    keyed = head + plain[192:208] + b"k" * 16 + plain[208:]
    table_end = 192 + 32
    assert reason_of(bench, keyed) == "checksum"
    checksum = xxhash.xxh3_64_intdigest(keyed[:184] + bytes(8) + keyed[192:table_end])
    keyed = bench.layout.patch(keyed, "checksum", checksum)
    assert reason_of(bench, keyed) == "version"
    assert parse_head(memoryview(keyed)).keyed
    verify_record(memoryview(keyed))
    with pytest.raises(CorruptRecordError, match="segment 0"):
        verify_record(memoryview(keyed[:-1] + bytes([keyed[-1] ^ 1])))


def test_a_forged_table_never_leads_outside_the_record(bench: Any, codec_name: str) -> None:
    record = bench.record(bench.raw(), codec_name)
    layout = bench.layout
    payload = layout.payloads(record)[0]
    nbytes = bench.spec.nbytes
    assert reason_of(bench, layout.forge(record, [payload], [2**32 - 1])) == "length"
    assert reason_of(bench, layout.forge(record, [payload], [1])) == "length"
    assert reason_of(bench, layout.forge(record, [b""], [nbytes])) == "length"
    assert reason_of(bench, layout.forge(record, [payload + payload], [nbytes])) in {"length", "codec"}
    assert reason_of(bench, layout.forge(record, [payload[:9], payload[9:]], [9, nbytes - 9])) in {"length", "spec"}
    stretched = layout.patch(layout.patch(record, "n_segments", 2), "flags", 2)
    assert reason_of(bench, stretched) == "length"


def test_a_segment_that_only_claims_to_be_encoded_is_refused_raw(bench: Any) -> None:
    record = bench.record(bench.raw())
    assert reason_of(bench, bench.layout.forge(record, [b"x" * 100])) == "codec"


@pytest.mark.parametrize(
    ("codec_name", "content_bytes"),
    [("zstd", 1024), ("planes", 256), ("planes-base", 64)],  # block, hi plane of the keys, table
)
def test_forged_frames_are_refused_before_they_are_unpacked(bench: Any, codec_name: str, content_bytes: int) -> None:
    layout = bench.layout
    record = bench.record(bench.raw(), codec_name)
    honest = layout.payloads(record)[0]
    frame = zstandard.compress(bytes(content_bytes))
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    stream = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    large = b"".join(stream.compress(bytes(1 << 20)) for _ in range(16))[:100]  # the start of one that declares 1 GiB
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(content_bytes))
    forgeries = [BOMB, large, frame + b"\0", frame + frame, frame + skippable, skippable + frame, skippable]
    forgeries += [frame[:-1], frame[:5], b"\0", unsized, b"\xff" * 200]
    forgeries += [zstandard.compress(bytes(content_bytes + more)) for more in (-1, 1)]

    def forge(forged: bytes) -> bytes:
        payload = forged if codec_name == "zstd" else with_frame(honest, forged)
        return bytes(layout.forge(record, [payload]))

    assert large
    bench.read(forge(frame))  # only what was done to the frame is wrong with the others
    for forged in forgeries:
        damaged = forge(forged)
        tracemalloc.start()
        try:
            assert reason_of(bench, damaged) == "codec", forged[:16]
            assert tracemalloc.get_traced_memory()[1] < 64 * 1024, forged[:16]
        finally:
            tracemalloc.stop()


def test_a_frame_of_a_gigabyte_is_not_unpacked(bench: Any) -> None:
    """32 KiB that really produce 1 GiB, in a record that says so of a block of 1 KiB."""
    stream = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    megabyte = bytes(1 << 20)
    frame = b"".join(stream.compress(megabyte) for _ in range(1 << 10)) + stream.flush()
    assert len(frame) > 1 << 14
    spec = BlockSpec.opaque(64 << 10, block_tokens=8, tag="t")
    decoder = BlockDecoder(spec, bench.namespace, bench.codec)
    encoded = BlockEncoder(spec, bench.namespace, bench.codec(1)).encode(
        memoryview(bytes(64 << 10)), RecordMeta(bench.digest)
    )
    record = bench.layout.forge(b"".join(encoded.buffers), [frame])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError, match="declares 1073741824 bytes"):
            decoder.open(memoryview(record), bench.digest)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def with_frame(payload: bytes, frame: bytes) -> bytes:
    """Replace the first frame of a planes payload."""
    n = int.from_bytes(payload[:4], "little")
    lengths = [int.from_bytes(payload[4 + 4 * i : 8 + 4 * i], "little") for i in range(n)]
    frames_start = len(payload) - sum(lengths)
    head = payload[:4] + len(frame).to_bytes(4, "little") + payload[8:frames_start]
    return head + frame + payload[frames_start + lengths[0] :]


@pytest.mark.parametrize("codec_name", ["planes", "planes-base"])
def test_forged_plane_payloads_are_refused(bench: Any, codec_name: str) -> None:
    record = bench.record(bench.raw(), codec_name)
    payload = bench.layout.payloads(record)[0]
    most = b"\xff" * 4
    forgeries = [
        b"\0" * 4 + payload[4:],  # no frames
        b"\1\0\0\0" + payload[4:],  # too few
        b"\7\0\0\0" + payload[4:],  # too many
        most + payload[4:],
        payload[:4] + most + payload[8:],  # a frame longer than the segment
        payload[:4] + most * 2 + payload[12:],
        payload[:-1],
        payload + b"\0",
        payload[:3],
        payload[:4],
        payload[:12],
        payload[:4],
    ]
    for forged in forgeries:
        assert reason_of(bench, bench.layout.forge(record, [forged])) == "codec"


def test_planes_of_a_dtype_without_planes_are_refused(bench: Any) -> None:
    spec = BlockSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=8, dtype="float32")
    encoded = BlockEncoder(spec, bench.namespace, bench.codec(1)).encode(
        memoryview(bytes(spec.nbytes)), RecordMeta(bench.digest)
    )
    record = b"".join(encoded.buffers)
    for codec_id in (2, 3):
        forged = bench.layout.seal(bench.layout.patch(record, "codec", codec_id))
        with pytest.raises(CorruptRecordError) as caught:
            BlockDecoder(spec, bench.namespace, bench.codec).open(memoryview(forged), bench.digest)
        assert caught.value.reason == "codec"


def test_a_huge_foreign_value_is_refused_without_reading_it(bench: Any) -> None:
    record = bench.record(bench.raw())
    claims_much = bench.layout.patch(record, "n_segments", 2**24)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError):
            bench.decoder.open(memoryview(claims_much + bytes(1 << 20)), bench.digest)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


@QUIET
@given(data=st.binary(max_size=600))
def test_random_bytes_are_never_a_record(bench: Any, data: bytes) -> None:
    reason_of(bench, data)
    if len(data) > 192:
        reason_of(bench, b"KVB\x01\x01\x00\xc0\x00" + data[8:])


@QUIET
@given(data=st.data(), codec=st.sampled_from(["none", "zstd", "planes", "planes-base"]))
def test_a_forger_with_the_right_checksums_gets_a_miss_or_a_block_of_the_right_size(
    bench: Any, data: st.DataObject, codec: str
) -> None:
    record = bench.record(bench.raw(), codec)
    payload = bytearray(bench.layout.payloads(record)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(payload) - 1))
        payload[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    forged = bench.layout.forge(record, [bytes(payload[: len(payload) - cut])])
    try:
        block = bench.read(forged)
    except CorruptRecordError:
        return  # and Bench.read saw that the destination was not touched
    assert len(block) == bench.spec.nbytes


@QUIET
@given(
    field=st.sampled_from(["flags", "codec", "dtype", "n_segments", "raw_len", "stored_len", "block_tokens"]),
    value=st.integers(0, 2**64 - 1),
)
def test_a_forged_field_is_a_miss(bench: Any, field: str, value: int) -> None:
    record = bench.record(bench.raw(), "planes")
    bits = {"flags": 32, "codec": 16, "dtype": 8, "n_segments": 32, "block_tokens": 32}.get(field, 64)
    changed = bench.layout.patch(record, field, value % 2**bits)
    if changed == record or (field == "flags" and value % 2**bits == 1):
        return
    reason_of(bench, changed)
    if bench.layout.read(changed, "n_segments") == 1:
        reason_of(bench, bench.layout.seal(changed))
