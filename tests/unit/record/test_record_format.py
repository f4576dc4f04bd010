from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.errors import CorruptRecordError
from kvstore.record import RecordMeta, parse_head, verify_record
from kvstore.segments import plan_segments
from kvstore.spec import BlockSpec

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "record_vectors.json").read_text())["vectors"]


def test_every_header_field_is_where_the_format_says(bench: Any) -> None:
    raw = bench.raw()
    ids = bytes(range(32))
    record = bench.record(raw, "planes", parent=b"p" * 32, block_index=7, group=3, token_ids=ids)
    read = bench.layout.read
    expected = {
        "magic": b"KVB\x01",
        "format_version": 1,
        "header_len": 192,
        "flags": 2,
        "codec": 2,
        "dtype": 3,
        "layout": 1,
        "namespace": bench.namespace,
        "digest": bench.digest,
        "parent": b"p" * 32,
        "fingerprint": bench.spec.fingerprint(),
        "block_index": 7,
        "block_tokens": 8,
        "group": 3,
        "n_segments": 2,
        "raw_len": bench.spec.nbytes,
        "stored_len": len(record) - 192 - 32,
        "created": 1_700_000_000,
        "tag": bytes(16),
        "zero": bytes(16),
    }
    assert {field: read(record, field) for field in expected} == expected
    assert bench.layout.seal(record) == record
    assert bench.layout.forge(record, bench.layout.payloads(record)) == record
    assert bench.layout.payloads(record)[-1] == ids


def test_a_raw_record_is_a_head_and_the_block_itself(bench: Any) -> None:
    raw = bench.raw()
    encoder = BlockEncoder(bench.spec, bench.namespace, None)
    encoded = encoder.encode(memoryview(raw), RecordMeta(bench.digest))
    head, payload = encoded.buffers
    assert isinstance(payload, memoryview)
    assert payload.obj is raw
    assert len(head) == 192 + 16
    assert encoded.stored_raw


@pytest.mark.parametrize(
    ("meta", "flags"),
    [
        (RecordMeta(bytes(range(32))), 0),
        (RecordMeta(bytes(range(32)), b"q" * 32, 5, 1), 0),
        (RecordMeta(bytes(range(32)), parent_known=False), 1),
        (RecordMeta(bytes(range(32)), None, 2**32 - 1, 2**32 - 1, bytes(32)), 2),
        (RecordMeta(bytes(range(32)), token_ids=bytes(32), parent_known=False), 3),
    ],
)
def test_meta_comes_back_as_it_was_given(bench: Any, codec_name: str, meta: RecordMeta, flags: int) -> None:
    fields = {name: getattr(meta, name) for name in RecordMeta.__slots__}
    raw = bench.raw()
    record = bench.record(raw, codec_name, **fields)
    opened = bench.decoder.open(memoryview(record), bench.digest)
    assert opened.meta == meta
    assert opened.created == 1_700_000_000
    assert opened.header_checksum == bench.layout.read(record, "checksum")
    assert bench.layout.read(record, "flags") == flags
    assert bench.read(record) == raw


@pytest.mark.parametrize(
    "fields",
    [
        {"digest": b"short"},
        {"parent": b"short"},
        {"block_index": -1},
        {"block_index": 2**32},
        {"group": 2**32},
        {"parent": bytes(32), "parent_known": False},
        {"token_ids": b""},
        {"token_ids": b"123"},
    ],
)
def test_impossible_meta_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"RecordMeta\."):
        RecordMeta(**{"digest": bytes(32), **fields})


def test_an_encoder_refuses_what_does_not_fit_its_spec(bench: Any) -> None:
    encoder = BlockEncoder(bench.spec, bench.namespace, None)
    raw = bench.raw()
    with pytest.raises(ValueError, match="has 1024 bytes, got 1023"):
        encoder.encode(memoryview(raw)[1:], RecordMeta(bench.digest))
    with pytest.raises(ValueError, match="8 tokens needs 4 each"):
        encoder.encode(memoryview(raw), RecordMeta(bench.digest, token_ids=bytes(4)))
    with pytest.raises(ValueError, match="digest of 16"):
        BlockEncoder(bench.spec, b"ns", None)
    with pytest.raises(ValueError, match="digest of 16"):
        BlockDecoder(bench.spec, b"ns", bench.codec)


def test_a_destination_of_the_wrong_length_is_refused_untouched(bench: Any, codec_name: str) -> None:
    opened = bench.decoder.open(memoryview(bench.record(bench.raw(), codec_name)), bench.digest)
    out = bytearray(bench.spec.nbytes + 1)
    with pytest.raises(ValueError, match="the destination 1025"):
        opened.write_into(memoryview(out))
    assert not any(out)


def test_the_head_can_be_read_without_the_payload(bench: Any, codec_name: str) -> None:
    record = bench.record(bench.raw(), codec_name)
    whole = parse_head(memoryview(record))
    alone = parse_head(memoryview(record)[: whole.head_bytes], record_bytes=len(record))
    assert alone == whole
    assert whole.record_bytes == len(record)
    assert verify_record(memoryview(record)) == whole
    with pytest.raises(CorruptRecordError):
        parse_head(memoryview(record)[: whole.head_bytes])


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_records_written_on_day_one_still_read(bench: Any, vector: dict[str, Any]) -> None:
    """These bytes were written by format version 1; they are never written anew."""
    spec = BlockSpec.opaque(**vector["opaque"]) if "opaque" in vector else BlockSpec(**vector["spec"])
    record, raw = bytes.fromhex(vector["record"]), bytes.fromhex(vector["raw"])
    namespace, digest = bytes.fromhex(vector["namespace"]), bytes.fromhex(vector["digest"])
    decoder = BlockDecoder(spec, namespace, bench.codec)
    out = bytearray(spec.nbytes)
    opened = decoder.open(memoryview(record), digest)
    opened.write_into(memoryview(out))
    assert bytes(out) == raw
    assert opened.codec_id == vector["codec_id"]
    read = bench.layout.read
    assert [read(record, field) for field in ("format_version", "header_len", "codec")] == [1, 192, vector["codec_id"]]
    assert [r for _, r, _ in bench.layout.table(record)] == vector["segment_raw_bytes"]
    assert bench.layout.forge(record, bench.layout.payloads(record)) == record
    if vector["codec_id"] == 0:
        encoder = BlockEncoder(spec, namespace, None, clock=lambda: float(vector["created"]))
        assert b"".join(encoder.encode(memoryview(raw), opened.meta).buffers) == record


def test_the_vectors_cover_every_codec_and_the_token_ids() -> None:
    assert {v["codec_id"] for v in VECTORS} == {0, 1, 2, 3}
    assert any(v["token_ids"] for v in VECTORS)


def test_segments_of_a_vector_follow_the_plan() -> None:
    spec = BlockSpec(layers=8, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
    assert [g.raw_bytes for g in plan_segments(spec)] == [262144, 262144]
