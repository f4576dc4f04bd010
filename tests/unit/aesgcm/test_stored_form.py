"""What an encrypted segment looks like, by code that shares nothing with the codec but the cipher."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from kvstore_aesgcm.namespace_keys import derived_key

from kvstore.codec import MAX_SEAL_BYTES
from kvstore.keyring import SecretKey
from kvstore.none_codec import NoneCodec
from kvstore.segments import plan_segments
from kvstore.spec import BlockSpec
from tests.unit.aesgcm.sealing import (
    DIGEST,
    FP8,
    KEY_1,
    KEY_2,
    NAMESPACE,
    SPEC,
    codec_of,
    gauss,
    geometry,
    noise,
    opened,
)

OVERHEAD_BYTES = 36


def hkdf(material: bytes, info: bytes) -> bytes:
    """RFC 5869 by its definition: extract, then one block of expand."""
    extracted = hmac.digest(b"kvstore/aes-gcm/1", material, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def by_hand(stored: bytes, key: str, first_item: int, raw_bytes: int) -> tuple[int, int, bytes]:
    """Key id, inner codec id and plaintext."""
    place = first_item.to_bytes(8, "little") + raw_bytes.to_bytes(8, "little")
    bound = b"kvstore/aes-gcm\x01" + stored[:8] + NAMESPACE + DIGEST + place
    plain = AESGCM(hkdf(bytes.fromhex(key), NAMESPACE)).decrypt(stored[8:20], stored[20:], bound)
    return int.from_bytes(stored[:4], "little"), int.from_bytes(stored[4:6], "little"), plain


def test_a_segment_is_prefix_nonce_ciphertext_and_tag() -> None:
    stored = codec_of((7, KEY_1), inner="none").encode_segment(noise(), geometry())
    assert len(stored) == geometry().raw_bytes + OVERHEAD_BYTES
    assert by_hand(stored, KEY_1, 0, geometry().raw_bytes) == (7, 0, bytes(noise()))
    assert OVERHEAD_BYTES <= MAX_SEAL_BYTES


def test_the_plaintext_is_what_the_inner_codec_makes() -> None:
    codec = codec_of(inner="planes")
    stored = codec.encode_segment(gauss(), geometry())
    _, inner_id, plain = by_hand(stored, KEY_1, 0, geometry().raw_bytes)
    assert inner_id == 2
    assert len(plain) < 0.9 * geometry().raw_bytes
    assert opened(codec_of(), stored, geometry()) == bytes(gauss())


def test_every_segment_is_bound_to_where_it_begins() -> None:
    large = BlockSpec(layers=8, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
    second = plan_segments(large)[1]
    assert second.first_item > 0
    raw = memoryview(bytes(second.raw_bytes))
    stored = codec_of(inner="none").encode_segment(raw, second)
    assert by_hand(stored, KEY_1, second.first_item, second.raw_bytes)[2] == bytes(raw)


@pytest.mark.parametrize("key_id", [0, 1, (1 << 32) - 1])
def test_every_key_id_fits(key_id: int) -> None:
    codec = codec_of((key_id, KEY_2), inner="none")
    stored = codec.encode_segment(noise(), geometry())
    assert by_hand(stored, KEY_2, 0, geometry().raw_bytes)[0] == key_id
    assert opened(codec, stored, geometry()) == bytes(noise())


def test_the_derived_key_is_hkdf_of_the_key_and_the_namespace() -> None:
    key = SecretKey(1, bytes.fromhex(KEY_1))
    assert derived_key(key, NAMESPACE) == hkdf(key.material, NAMESPACE)
    others = {derived_key(key, bytes(16)), derived_key(SecretKey(1, bytes.fromhex(KEY_2)), NAMESPACE)}
    assert len(others | {derived_key(key, NAMESPACE), key.material}) == 4


@pytest.mark.parametrize(("spec", "inner", "expected"), [
    (SPEC, "planes", 2),
    (SPEC, "planes-base", 3),
    (SPEC, "zstd", 1),
    (SPEC, "none", 0),
    (FP8, "planes", 1),  # as the core does with a codec that does not support a block
    (FP8, "none", 0),
])  # fmt: skip
def test_the_inner_codec_follows_the_block(spec: BlockSpec, inner: str, expected: int) -> None:
    codec = codec_of(inner=inner)
    stored = codec.encode_segment(memoryview(bytes(geometry(spec).raw_bytes)), geometry(spec))
    assert int.from_bytes(stored[4:6], "little") == expected
    assert opened(codec, stored, geometry(spec)) == bytes(geometry(spec).raw_bytes)


@pytest.mark.parametrize("inner", ["planes", "planes-base", "zstd"])
def test_what_hardly_shrinks_is_encrypted_as_it_is(inner: str) -> None:
    codec = codec_of(inner=inner)
    stored = codec.encode_segment(noise(), geometry())
    assert by_hand(stored, KEY_1, 0, geometry().raw_bytes)[1:] == (NoneCodec.codec_id, bytes(noise()))


def test_a_first_segment_that_hardly_shrinks_decides_for_its_block() -> None:
    codec = codec_of()
    codec.encode_segment(noise(), geometry())
    assert codec.encode_segment(gauss(), geometry())[4:6] == b"\0\0"
    codec.begin(NAMESPACE, DIGEST)
    assert codec.encode_segment(gauss(), geometry())[4:6] == b"\x02\0"


def test_no_nonce_comes_twice() -> None:
    """Threads have codecs of their own, so that counters would repeat; 10,000 segments from four of them."""
    tiny = BlockSpec(layers=1, kv_heads=1, head_dim=1, block_tokens=1, dtype="bfloat16", kv=1)
    raw, nonces = memoryview(b"kv"), set()
    for codec in [codec_of(inner="none") for _ in range(4)]:
        nonces |= {codec.encode_segment(raw, geometry(tiny))[8:20] for _ in range(2500)}
    assert len(nonces) == 10_000
    first_bytes = {nonce[0] for nonce in nonces}
    assert len(first_bytes) == 256  # and they are drawn from everywhere
