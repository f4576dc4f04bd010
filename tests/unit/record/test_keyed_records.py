"""Keyed records against an implementation of their own, straight from the format's page."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.errors import CorruptRecordError
from kvstore.keyring import Keyring, SecretKey
from kvstore.record import RecordMeta, parse_head, verify_record
from kvstore.record_tags import RecordTags
from kvstore.spec import BlockSpec

KEY, OLD_KEY, FOREIGN_KEY = (SecretKey(i, bytes([i]) * 32) for i in (1, 2, 3))
VECTORS = json.loads((Path(__file__).parents[2] / "data" / "record_vectors.json").read_text())["keyed_vectors"]
ENTRY = struct.Struct("<IIQ16s")
SEGMENTED = BlockSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=64, dtype="bfloat16")  # 4 segments


def derived(material: bytes, namespace: bytes) -> bytes:
    return hashlib.blake2b(namespace, key=material, person=b"kvstore-record", digest_size=32).digest()


def tag_of(material: bytes, namespace: bytes, person: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=derived(material, namespace), person=person, digest_size=16).digest()


def resealed(record: bytes, material: bytes | None) -> bytes:
    """The header's tag (with a key) and checksum computed anew over a keyed head as it is."""
    end = 192 + 32 * struct.unpack_from("<I", record, 124)[0]
    head, table, namespace = record[:192], record[192:end], record[16:32]
    if material is not None:
        covered = head[:152] + bytes(16) + head[168:184] + bytes(8) + table
        head = head[:152] + tag_of(material, namespace, b"kvstore-head", covered) + head[168:]
    checksum = xxhash.xxh3_64_intdigest(head[:184] + bytes(8) + table)
    return head[:184] + struct.pack("<Q", checksum) + table + record[end:]


def made_keyed(plain: bytes, material: bytes) -> bytes:
    """The keyed record of a plain one."""
    namespace, n = plain[16:32], struct.unpack_from("<I", plain, 124)[0]
    table, offset = b"", 192 + 16 * n
    payload = plain[offset:]
    for i in range(n):
        stored, raw, checksum = struct.unpack_from("<IIQ", plain, 192 + 16 * i)
        piece = plain[offset : offset + stored]
        table += ENTRY.pack(stored, raw, checksum, tag_of(material, namespace, b"kvstore-segment", piece))
        offset += stored
    flags = struct.unpack_from("<I", plain, 8)[0] | 4
    return resealed(plain[:8] + struct.pack("<I", flags) + plain[12:192] + table + payload, material)


def tags_of(namespace: bytes, *keys: SecretKey) -> RecordTags:
    return RecordTags(Keyring(keys), namespace)


def decoder(bench: Any, *keys: SecretKey, spec: BlockSpec | None = None) -> BlockDecoder:
    return BlockDecoder(spec or bench.spec, bench.namespace, bench.codec, tags=tags_of(bench.namespace, *keys))


def reason(attempt: Callable[..., object], *args: Any) -> str:
    with pytest.raises(CorruptRecordError) as caught:
        attempt(*args)
    return caught.value.reason


def read(reader: BlockDecoder, record: bytes, digest: bytes, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    reader.open(memoryview(record), digest).write_into(memoryview(out))
    return bytes(out)


def in_layers(reader: BlockDecoder, record: bytes, digest: bytes) -> bytes:
    """Read segment by segment, as a stream does."""
    head = parse_head(memoryview(record))
    table = reader.open_head(memoryview(record)[: head.head_bytes], digest)
    found = b""
    for index, (start, stop) in enumerate(table.spans):
        out = bytearray(head.raw_bytes // len(table.spans))
        reader.open_segment(table, index, memoryview(record)[start:stop]).write_into(memoryview(out))
        found += out
    return found


def encoded(bench: Any, codec: Any, key: SecretKey, raw: bytes, spec: BlockSpec | None = None, **meta: Any) -> bytes:
    spec = spec or bench.spec
    encoder = BlockEncoder(
        spec, bench.namespace, codec, clock=lambda: 1_700_000_000.9, tags=tags_of(bench.namespace, key)
    )
    made = encoder.encode(memoryview(raw), RecordMeta(**{"digest": bench.digest, **meta}))
    record = b"".join(made.buffers)
    assert len(record) == made.nbytes
    return record


@pytest.mark.parametrize("ids", [None, bytes(range(32))])
def test_a_keyed_record_is_what_the_format_says(bench: Any, codec_name: str, ids: bytes | None) -> None:
    raw = bench.raw()
    plain = bench.record(raw, codec_name, token_ids=ids)
    codec = bench.codec(["none", "zstd", "planes", "planes-base"].index(codec_name))
    record = encoded(bench, codec, KEY, raw, token_ids=ids)
    assert record == made_keyed(plain, KEY.material)
    reader = decoder(bench, KEY)
    assert read(reader, record, bench.digest, len(raw)) == raw
    assert reader.open(memoryview(record), bench.digest).token_ids == ids
    assert in_layers(reader, record, bench.digest) == raw
    assert verify_record(memoryview(record), Keyring([KEY])).keyed
    assert verify_record(memoryview(record)).keyed


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_keyed_records_written_on_day_one_still_read(bench: Any, vector: dict[str, Any]) -> None:
    """These bytes were written by format version 1; they are never written anew."""
    spec, raw, record = BlockSpec(**vector["spec"]), bytes.fromhex(vector["raw"]), bytes.fromhex(vector["record"])
    namespace, key = bytes.fromhex(vector["namespace"]), SecretKey(1, bytes.fromhex(vector["key"]))
    reader = BlockDecoder(spec, namespace, bench.codec, tags=tags_of(namespace, key))
    assert read(reader, record, bytes.fromhex(vector["digest"]), spec.nbytes) == raw
    assert resealed(record, key.material) == record
    assert record[152:168] == bytes.fromhex(vector["tag"])


def test_every_key_of_the_ring_reads_and_no_other(bench: Any) -> None:
    raw = bench.raw()
    record = encoded(bench, None, OLD_KEY, raw)
    for ring in ((OLD_KEY,), (KEY, OLD_KEY), (OLD_KEY, KEY), (FOREIGN_KEY, KEY, OLD_KEY)):
        assert read(decoder(bench, *ring), record, bench.digest, len(raw)) == raw
    for ring in ((KEY,), (KEY, FOREIGN_KEY)):
        reader = decoder(bench, *ring)
        assert reason(reader.open, memoryview(record), bench.digest) == "tag"
        assert reason(verify_record, memoryview(record), Keyring(ring)) == "tag"
        assert reason(in_layers, reader, record, bench.digest) == "tag"


def test_a_record_without_tags_is_not_believed_where_there_are_keys(bench: Any, codec_name: str) -> None:
    raw = bench.raw()
    plain = bench.record(raw, codec_name)
    assert bench.read(plain) == raw
    reader = decoder(bench, KEY)
    assert reason(lambda: reader.open(memoryview(plain), bench.digest)) == "tag"
    assert reason(lambda: in_layers(reader, plain, bench.digest)) == "tag"
    assert reason(lambda: verify_record(memoryview(plain), Keyring([KEY]))) == "tag"
    keyed = made_keyed(plain, KEY.material)
    assert reason(lambda: bench.decoder.open(memoryview(keyed), bench.digest)) == "version"


def test_the_key_of_one_namespace_is_of_no_use_in_another(bench: Any) -> None:
    raw, other = bench.raw(), bytes(16)
    plain = bench.layout.seal(bench.layout.patch(bench.record(raw), "namespace", other))
    of_other = made_keyed(plain, KEY.material)  # by a holder of the ring, with the key of the other namespace
    moved = of_other[:16] + bench.namespace + of_other[32:]  # by someone without
    assert reason(lambda: decoder(bench, KEY).open(memoryview(resealed(moved, None)), bench.digest)) == "tag"
    assert reason(lambda: decoder(bench, KEY).open(memoryview(of_other), bench.digest)) == "key"
    reader = BlockDecoder(bench.spec, other, bench.codec, tags=tags_of(other, KEY))
    assert read(reader, of_other, bench.digest, len(raw)) == raw


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", bytes(32)),
        ("parent", b"p" * 32),
        ("block_index", 5),
        ("group", 1),
        ("created", 0),
        ("flags", 5),
        ("tag", bytes(16)),
        ("tag", b"t" * 16),
        ("fingerprint", bytes(16)),
    ],
)
def test_no_field_can_be_changed_by_who_only_knows_how_checksums_go(bench: Any, field: str, value: Any) -> None:
    record = encoded(bench, None, KEY, bench.raw())
    forged = resealed(bench.layout.patch(record, field, value), None)
    asked = value if field == "digest" else bench.digest  # a record of block A that is to pass for block B
    assert reason(lambda: decoder(bench, KEY).open(memoryview(forged), asked)) == "tag"
    assert parse_head(memoryview(forged)).keyed, "as far as checksums go, it is sound"
    assert reason(lambda: in_layers(decoder(bench, KEY), forged, asked)) == "tag"


@pytest.mark.parametrize("swap", [False, True])
def test_no_segment_can_be_changed_or_moved(bench: Any, swap: bool) -> None:
    raw = bench.raw(SEGMENTED)
    record = encoded(bench, None, KEY, raw, SEGMENTED)
    reader = decoder(bench, KEY, spec=SEGMENTED)
    assert in_layers(reader, record, bench.digest) == read(reader, record, bench.digest, len(raw)) == raw
    rows = [list(ENTRY.unpack_from(record, 192 + 32 * i)) for i in range(4)]
    size = len(raw) // 4
    pieces = [raw[size * i : size * (i + 1)] for i in range(4)]
    if swap:
        rows[1], rows[2], pieces[1], pieces[2] = rows[2], rows[1], pieces[2], pieces[1]
    else:
        pieces[1] = bytes(size)
        rows[1][2] = xxhash.xxh3_64_intdigest(pieces[1])
    forged = resealed(record[:192] + b"".join(ENTRY.pack(*row) for row in rows) + b"".join(pieces), None)
    assert reason(lambda: reader.open(memoryview(forged), bench.digest)) == "tag"
    assert reason(lambda: in_layers(reader, forged, bench.digest)) == "tag"


def test_a_segment_with_the_right_checksum_and_the_wrong_tag_is_refused(bench: Any) -> None:
    """As somebody makes it who finds other bytes with the same XXH3, which is no cryptographic hash."""
    raw = bench.raw(SEGMENTED)
    record = encoded(bench, None, KEY, raw, SEGMENTED)
    rows = [list(ENTRY.unpack_from(record, 192 + 32 * i)) for i in range(4)]
    rows[2][3] = tag_of(KEY.material, bench.namespace, b"kvstore-segment", b"other bytes")
    made = resealed(record[:192] + b"".join(ENTRY.pack(*row) for row in rows) + raw, KEY.material)
    reader = decoder(bench, KEY, spec=SEGMENTED)
    assert reason(lambda: reader.open(memoryview(made), bench.digest)) == "tag"
    assert reason(lambda: verify_record(memoryview(made), Keyring([KEY]))) == "tag"
    verify_record(memoryview(made))
    table = reader.open_head(memoryview(made)[: 192 + 4 * 32], bench.digest)
    spans = [memoryview(made)[start:stop] for start, stop in table.spans]
    reader.open_segment(table, 1, spans[1])
    assert reason(lambda: reader.open_segment(table, 2, spans[2])) == "tag"


def test_tags_of_heads_and_of_segments_are_not_good_for_each_other(bench: Any) -> None:
    data = b"some bytes"
    assert tag_of(KEY.material, bytes(16), b"kvstore-head", data) != tag_of(
        KEY.material, bytes(16), b"kvstore-segment", data
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_is_noticed_even_with_the_checksums_made_right(bench: Any, data: st.DataObject) -> None:
    record = encoded(bench, None, KEY, bench.raw())
    at = data.draw(st.integers(0, len(record) - 1))
    changed = bytearray(record)
    changed[at] ^= data.draw(st.integers(1, 255))
    payload = bytes(changed[192 + 32 :])
    if at >= 192 + 32:
        struct.pack_into("<Q", changed, 192 + 8, xxhash.xxh3_64_intdigest(payload))
    forged = bytes(changed)
    if not 124 <= at < 128 and not 4 <= at < 8:  # the table is still where it was
        forged = resealed(forged, None)
    if forged == record:  # the checksum itself was changed, and made right again
        return
    assert reason(lambda: decoder(bench, KEY).open(memoryview(forged), bench.digest)) in {
        *("tag", "length", "version", "magic", "key", "checksum"),
    }
