"""What was not encrypted with the key, for the place, is never taken for a block."""

from __future__ import annotations

import contextlib
import dataclasses
import tracemalloc

import numpy as np
import pytest
from kvstore_aesgcm.gcm_codec import AesGcmCodec
from kvstore_aesgcm.options import AesGcmOptions

from kvstore.codec import CodecContext
from kvstore.errors import CorruptRecordError
from kvstore.segments import SegmentGeometry
from tests.unit.aesgcm.sealing import (
    DIGEST,
    KEY_1,
    KEY_2,
    NAMESPACE,
    SPEC,
    codec_of,
    gauss,
    geometry,
    keys,
    noise,
    opened,
    regions,
)


def reason(*args: object) -> str:
    with pytest.raises(CorruptRecordError) as caught:
        opened(*args)  # type: ignore[arg-type]
    return caught.value.reason


@pytest.mark.parametrize("inner", ["none", "planes"])
@pytest.mark.parametrize("region", [name for name, _ in regions(bytes(64))])
def test_a_changed_byte_anywhere_is_noticed(region: str, inner: str) -> None:
    codec = codec_of(inner=inner)
    stored = codec.encode_segment(gauss(), geometry())
    assert opened(codec, stored, geometry()) == bytes(gauss())
    span = dict(regions(stored))[region]
    rng = np.random.default_rng(3)
    places = list(span) if len(span) <= 16 else rng.choice(span, 40, replace=False).tolist()
    expected = {"key id": {"codec"}, "reserved": {"codec"}, "inner codec id": {"codec", "tag"}}.get(region, {"tag"})
    for at in places:
        bad = bytearray(stored)
        bad[at] ^= 1 << int(rng.integers(8))
        assert reason(codec, bytes(bad), geometry()) in expected, at


def test_every_other_length_is_noticed() -> None:
    codec = codec_of(inner="planes")
    stored = codec.encode_segment(gauss(), geometry())
    for bad in (*(stored[:n] for n in (0, 1, 8, 20, 35, 36, 37, len(stored) - 1)), stored + b"\0", stored + stored):
        assert reason(codec, bad, geometry()) in {"tag", "codec"}, len(bad)


@pytest.mark.parametrize(("namespace", "digest"), [
    (NAMESPACE, bytes(32)),
    (bytes(16), DIGEST),
    (NAMESPACE, DIGEST[:-1] + b"\0"),
], ids=["other block", "other namespace", "one byte of the digest"])  # fmt: skip
def test_a_segment_of_another_block_or_namespace_does_not_decrypt(namespace: bytes, digest: bytes) -> None:
    writer, reader = codec_of(), codec_of(begun=False)
    stored = writer.encode_segment(gauss(), geometry())
    reader.begin(namespace, digest)
    assert reason(reader, stored, geometry()) == "tag"
    reader.begin(NAMESPACE, DIGEST)
    assert opened(reader, stored, geometry()) == bytes(gauss())


def test_a_segment_of_another_place_in_the_block_does_not_decrypt() -> None:
    codec = codec_of()
    stored = codec.encode_segment(gauss(), geometry())
    elsewhere = dataclasses.replace(geometry(), first_item=1)
    assert reason(codec, stored, elsewhere) == "tag"


def test_a_segment_of_another_raw_length_does_not_decrypt() -> None:
    codec = codec_of()
    stored = codec.encode_segment(gauss(), geometry())
    larger = dataclasses.replace(SPEC, head_dim=2 * SPEC.head_dim)
    assert reason(codec, stored, geometry(larger)) == "tag"


def test_another_key_of_the_same_id_does_not_decrypt() -> None:
    stored = codec_of((1, KEY_1)).encode_segment(gauss(), geometry())
    assert reason(codec_of((1, KEY_2)), stored, geometry()) == "tag"


def test_the_key_of_another_namespace_does_not_decrypt() -> None:
    """Even with everything else moved along: what encrypts is a key of the namespace."""
    mine, theirs = codec_of(inner="none"), codec_of(inner="none", begun=False)
    stored = mine.encode_segment(noise(), geometry())
    theirs.begin(bytes(16), DIGEST)
    theirs._block = NAMESPACE + DIGEST  # the additional data agree; the key does not
    assert reason(theirs, stored, geometry()) == "tag"


def test_rotation_reads_with_every_key_and_writes_with_the_first() -> None:
    old, both, new = codec_of((1, KEY_1)), codec_of((2, KEY_2), (1, KEY_1)), codec_of((2, KEY_2))
    of_old, of_both = old.encode_segment(gauss(), geometry()), both.encode_segment(gauss(seed=1), geometry())
    assert opened(both, of_old, geometry()) == bytes(gauss())
    assert opened(new, of_both, geometry()) == bytes(gauss(seed=1))
    assert reason(new, of_old, geometry()) == "codec"
    assert reason(old, of_both, geometry()) == "codec"


def test_a_codec_that_was_told_no_block_refuses_to_work() -> None:
    codec = codec_of(begun=False)
    stored = codec_of().encode_segment(gauss(), geometry())
    with pytest.raises(RuntimeError, match="begin"):
        codec.encode_segment(gauss(), geometry())
    with pytest.raises(RuntimeError, match="begin"):
        codec.open_segment(memoryview(stored), geometry())


@pytest.mark.parametrize("inner", ["none", "planes"])
def test_opening_takes_no_more_than_twice_the_segment_whatever_it_claims(inner: str) -> None:
    codec = codec_of(inner=inner)
    good = codec.encode_segment(gauss(), geometry())
    flipped = bytearray(good)
    flipped[30] ^= 1
    codec.open_segment(memoryview(good), geometry())  # whatever is made once is made now
    for stored in (good, bytes(flipped), bytes(len(good)), b"\xff" * (1 << 20), good[:36] + b"\xff" * 100):
        tracemalloc.start()
        with contextlib.suppress(CorruptRecordError):
            codec.open_segment(memoryview(stored), geometry())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= 2 * geometry().raw_bytes + 16_384


class Cheat(AesGcmCodec):
    """Has the key, and encrypts nonsense under the name of an inner codec."""

    claims = 2

    def _shortened(self, raw: memoryview, geometry: SegmentGeometry) -> tuple[memoryview | bytes, int]:
        return b"\xff" * 100, self.claims


@pytest.mark.parametrize("claims", [1, 2, 3, 4, 999])
def test_what_is_inside_must_still_be_what_the_inner_codec_writes(claims: int) -> None:
    codec = codec_of()
    cheat = Cheat(CodecContext(AesGcmOptions(keys=keys((1, KEY_1)), inner="none"), lambda _: None))
    cheat.claims = claims
    cheat.begin(NAMESPACE, DIGEST)
    assert reason(codec, cheat.encode_segment(gauss(), geometry()), geometry()) == "codec"
