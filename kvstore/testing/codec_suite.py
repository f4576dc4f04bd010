"""The suite that proves a codec right."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import MAX_SEAL_BYTES, Codec, CodecContext
from kvstore.errors import CorruptRecordError
from kvstore.plugins import Registry
from kvstore.record import RecordMeta, verify_record
from kvstore.segments import SegmentGeometry, plan_segments
from kvstore.spec import DTYPES, BlockSpec
from kvstore.testing.deviations import Suite

LAYOUTS: Final = ("LCND", "NCLD", "LCHND", "LNCD", "CLND", "NLCD", "CNLD")
_DTYPES: Final = tuple(name for name in DTYPES if name != "opaque")
_CONTENTS: Final = ("zeros", "noise", "normal", "every 16-bit pattern", "few symbols", "NaN payloads")
_BOMBS: Final = (
    bytes.fromhex("28b52ffde06c06060663636363"),  # a zstd frame that declares 7.8e18 bytes
    bytes.fromhex("28b52ffd20ff") + bytes(40),
    b"\xff\xff\xff\xff" * 64,
    b"\x02\0\0\0" + b"\xff\xff\xff\xff\xff\xff\xff\xff" + bytes(64),
)
_GUARD: Final = 64
_NAMESPACE: Final = bytes(range(16))
_BLOCK: Final = bytes(range(32))
_OTHER_BLOCK: Final = bytes(range(32, 64))
_WINDOW_BYTES: Final = 16  # noise repeats no run of this length by chance


def spec_of(dtype: str = "bfloat16", layout: str = "LCND", **changes: int) -> BlockSpec:
    """A block of a few segments' worth of small items."""
    shape = {"layers": 3, "kv_heads": 2, "head_dim": 24, "block_tokens": 16, **changes}
    return BlockSpec(**shape, dtype=dtype, layout=layout)  # type: ignore[arg-type]  # only integers by keyword


def content(kind: str, nbytes: int, seed: int = 5) -> bytes:
    """Bytes of a block."""
    rng = np.random.default_rng(seed)
    words = nbytes // 2 + 1
    match kind:
        case "zeros":
            return bytes(nbytes)
        case "noise":
            return rng.bytes(nbytes)
        case "normal":
            bits = rng.standard_normal(words, dtype=np.float32).view(np.uint32) >> 16
            return bits.astype(np.uint16).tobytes()[:nbytes]
        case "every 16-bit pattern":
            return np.resize(np.arange(1 << 16, dtype=np.uint16), words).tobytes()[:nbytes]
        case "few symbols":
            return rng.choice(np.array([0, 63, 191], dtype=np.uint8), nbytes).tobytes()
        case _:
            return (0x7F80 + rng.integers(0, 128, words, dtype=np.uint16)).tobytes()[:nbytes]


class CodecConformance(Suite):
    """Every law of :class:`kvstore.codec.Codec`, for the codec plugin named ``plugin``.

    A codec that declares ``seals`` is held to what that means, too.

    Attributes:
        plugin: Plugin name, as in ``codec = "..."``.
        options: Its options as in the config's ``[codecs.NAME]``, where the defaults will not do.
        examples: Random specs and contents that are tried.
    """

    plugin: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    examples: ClassVar[int] = 40

    @pytest.fixture
    def codec(self) -> Codec:
        """A codec of this thread that was told which block comes."""
        return begun(self.make())

    def registry(self) -> Registry:
        """The registry that knows the plugin; override it for one that is not installed."""
        return Registry.discover()

    def make(self) -> Codec:
        """Make one codec."""
        registry = self.registry()
        options = registry.codec(self.plugin).options
        if options is None or not self.options:
            return registry.create_codec(self.plugin)
        return registry.create_codec(self.plugin, CodecContext(options(**self.options), registry.find_codec))

    def _segments(self, spec: BlockSpec, raw: bytes) -> Iterator[tuple[SegmentGeometry, memoryview]]:
        view = memoryview(raw).toreadonly()
        for geometry in plan_segments(spec):
            yield geometry, view[geometry.raw_offset : geometry.raw_offset + geometry.raw_bytes]

    def _check(self, codec: Codec, spec: BlockSpec, raw: bytes) -> int:
        """Bring every segment there and back; returns how many were worth encoding."""
        encoded = 0
        for geometry, part in self._segments(spec, raw):
            stored = codec.encode_segment(part, geometry)
            if stored is None:
                assert not codec.seals, "a sealing codec leaves nothing to be stored as it is"
                continue
            encoded += 1
            if codec.seals:
                assert 0 < len(stored) <= geometry.raw_bytes + MAX_SEAL_BYTES
            else:
                assert len(stored) < geometry.raw_bytes, "a segment that does not shrink must be answered with None"
            assert decoded(codec, memoryview(bytes(stored)), geometry) == bytes(part)
            codec.recycle()
        return encoded

    def test_the_descriptor_names_this_codec(self, codec: Codec) -> None:
        assert codec.name == self.plugin
        assert 0 <= codec.codec_id < 1 << 16
        assert all(finding.ok for finding in self.registry().check(self.plugin))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", _DTYPES)
    def test_every_dtype_and_layout_comes_back_bit_for_bit(self, codec: Codec, dtype: str, layout: str) -> None:
        spec = spec_of(dtype, layout)
        for kind in _CONTENTS if codec.supports(spec) else ():
            self._check(codec, spec, content(kind, spec.nbytes))
        assert codec.supports(spec) in (True, False)

    @pytest.mark.parametrize("kind", _CONTENTS)
    def test_every_content_comes_back_from_large_blocks(self, codec: Codec, kind: str) -> None:
        spec = spec_of(layers=20, kv_heads=4, head_dim=64, block_tokens=32)  # several segments
        assert len(plan_segments(spec)) > 1
        assert codec.supports(spec)
        self._check(codec, spec, content(kind, spec.nbytes))

    def test_opaque_blocks_come_back_where_they_are_supported(self, codec: Codec) -> None:
        spec = BlockSpec.opaque(300_001, block_tokens=16, tag="rows")
        if codec.supports(spec):
            self._check(codec, spec, content("few symbols", spec.nbytes))

    def test_any_shape_comes_back(self) -> None:
        codec = begun(self.make())

        @settings(max_examples=self.examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            spec=st.builds(
                BlockSpec,
                layers=st.integers(1, 5),
                kv_heads=st.integers(1, 3),
                head_dim=st.sampled_from([1, 3, 8, 17]),
                block_tokens=st.sampled_from([1, 2, 7, 16, 33]),
                dtype=st.sampled_from(_DTYPES),
                layout=st.sampled_from(LAYOUTS),
                kv=st.integers(1, 2),
            ),
            kind=st.sampled_from(_CONTENTS),
            seed=st.integers(0, 999),
        )
        def run(spec: BlockSpec, kind: str, seed: int) -> None:
            if codec.supports(spec):
                self._check(codec, spec, content(kind, spec.nbytes, seed))

        run()

    def test_encoding_changes_no_input(self, codec: Codec) -> None:
        spec = spec_of()
        mine = bytearray(content("normal", spec.nbytes))
        for geometry, part in self._segments(spec, bytes(mine)):
            codec.encode_segment(memoryview(mine)[geometry.raw_offset :][: geometry.raw_bytes], geometry)
            assert part == memoryview(mine)[geometry.raw_offset :][: geometry.raw_bytes]

    def test_results_stay_valid_until_recycle(self, codec: Codec) -> None:
        spec = spec_of()
        raws = [content(kind, spec.nbytes) for kind in ("normal", "few symbols", "zeros") * 3]
        results = []
        for raw in raws:
            for geometry, part in self._segments(spec, raw):
                results.append((codec.encode_segment(part, geometry), geometry, part))
        for stored, geometry, part in results:
            if stored is not None:
                assert decoded(codec, memoryview(bytes(stored)), geometry) == bytes(part)

    def test_open_segments_are_written_later_and_elsewhere(self, codec: Codec) -> None:
        spec = spec_of()
        raws = [content(kind, spec.nbytes, seed) for seed, kind in enumerate(("normal", "few symbols", "NaN payloads"))]
        stored = [self._stored(codec, spec, raw) for raw in raws]
        opened = [codec.open_segment(memoryview(data), geometry) for data, geometry, _ in stored]
        outs = [bytearray(geometry.raw_bytes) for _, geometry, _ in stored]
        threads = [
            threading.Thread(target=segment.write_into, args=(memoryview(out),))
            for segment, out in zip(opened[::-1], outs[::-1], strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [bytes(out) for out in outs] == [raw for _, _, raw in stored]

    def _stored(self, codec: Codec, spec: BlockSpec, raw: bytes) -> tuple[bytes, SegmentGeometry, bytes]:
        """The first segment as it would be stored: encoded, or raw for a codec that encodes nothing."""
        geometry, part = next(self._segments(spec, raw))
        stored = codec.encode_segment(part, geometry)
        return (bytes(part) if stored is None else bytes(stored)), geometry, bytes(part)

    @pytest.mark.parametrize("kind", ["normal", "few symbols"])
    def test_a_payload_of_another_length_is_corrupt(self, codec: Codec, kind: str) -> None:
        spec = spec_of()
        good, geometry, _ = self._stored(codec, spec, content(kind, spec.nbytes))
        lengths = {0, 1, 3, 4, 8, len(good) // 2, len(good) - 1, *range(0, len(good), max(1, len(good) // 40))}
        for bad in [*(good[:length] for length in lengths), good + b"\0", good + good]:
            with pytest.raises(CorruptRecordError):
                codec.open_segment(memoryview(bad), geometry)

    def test_a_payload_for_another_geometry_is_corrupt(self, codec: Codec) -> None:
        spec = spec_of()
        good, _, _ = self._stored(codec, spec, content("normal", spec.nbytes))
        for other in (spec_of(layers=2), spec_of(layers=4), spec_of(head_dim=25)):
            with pytest.raises(CorruptRecordError):
                codec.open_segment(memoryview(good), plan_segments(other)[0])

    def test_hostile_payloads_raise_corrupt_or_write_exactly_their_length(self, codec: Codec) -> None:
        spec = spec_of()
        good, geometry, _ = self._stored(codec, spec, content("few symbols", spec.nbytes))
        rng = np.random.default_rng(0)
        flipped = []
        for bit in rng.integers(0, len(good) * 8, 200).tolist():
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << (bit % 8)
            flipped.append(bytes(bad))
        noise = [rng.bytes(int(n)) for n in rng.integers(1, 2 * len(good), 100)]
        same = [rng.bytes(len(good)) for _ in range(20)]
        for bad_bytes in [*flipped, *noise, *same, *_BOMBS, *(good[:40] + bomb for bomb in _BOMBS)]:
            start = time.monotonic()
            try:
                decoded(codec, memoryview(bad_bytes), geometry)
            except CorruptRecordError as e:
                assert e.reason in ({"codec", "tag"} if codec.seals else {"codec"})  # noqa: PT017 - one allowed outcome
            assert time.monotonic() - start < 1.0

    def test_threads_with_instances_of_their_own_do_not_disturb_each_other(self) -> None:
        spec = spec_of(layers=8, head_dim=64)
        wrong: list[object] = []

        def work(seed: int) -> None:
            codec = begun(self.make())
            try:
                for i in range(8):
                    self._check(codec, spec, content("normal", spec.nbytes, seed * 100 + i))
            except BaseException as e:  # noqa: BLE001 - the test's own thread judges it
                wrong.append(e)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_segments_of_several_blocks_are_opened_in_any_order(self, codec: Codec) -> None:
        spec = spec_of(layers=20, kv_heads=4, head_dim=64, block_tokens=32)
        raws = {_BLOCK: content("few symbols", spec.nbytes, 1), _OTHER_BLOCK: content("few symbols", spec.nbytes, 2)}
        stored: dict[tuple[int, bytes], tuple[bytes, SegmentGeometry, bytes]] = {}
        for block, raw in raws.items():
            begun(codec, block)
            for i, (geometry, part) in enumerate(self._segments(spec, raw)):
                found = codec.encode_segment(part, geometry)
                if found is not None:
                    stored[i, block] = bytes(found), geometry, bytes(part)
            codec.recycle()
        for (_, block), (data, geometry, raw) in sorted(stored.items(), key=lambda item: item[0]):
            begun(codec, block)
            assert decoded(codec, memoryview(data), geometry) == raw

    def test_a_record_holds_as_it_is_what_the_codec_does_not_seal_and_nothing_else(self, codec: Codec) -> None:
        spec = spec_of()
        raw, token_ids = content("noise", spec.nbytes), np.random.default_rng(1).bytes(4 * spec.block_tokens)
        encoder = BlockEncoder(spec, _NAMESPACE, codec)
        encoded = encoder.encode(memoryview(raw), RecordMeta(_BLOCK, token_ids=token_ids))
        record = b"".join(encoded.buffers)
        head = verify_record(memoryview(record))
        assert head.sealed == codec.seals
        windows = [raw[at : at + _WINDOW_BYTES] for at in range(0, spec.nbytes - _WINDOW_BYTES, 97)]
        assert any(window in record for window in windows) == (not codec.seals)
        assert (token_ids in record) == head.has_token_ids == (not codec.seals)
        other = self.make()
        decoder = BlockDecoder(spec, _NAMESPACE, {codec.codec_id: other}.get)
        out = bytearray(spec.nbytes)
        decoder.open(memoryview(record), _BLOCK).write_into(memoryview(out))
        assert out == raw

    def test_what_is_sealed_for_one_block_does_not_open_as_another(self, codec: Codec) -> None:
        geometry, part = next(self._segments(spec_of(), content("few symbols", spec_of().nbytes)))
        encoded = begun(codec, _BLOCK).encode_segment(part, geometry)
        if encoded is None:
            assert not codec.seals
            return
        stored = bytes(encoded)
        codec.recycle()
        try:
            as_another: bytes | None = decoded(begun(codec, _OTHER_BLOCK), memoryview(stored), geometry)
        except CorruptRecordError:
            as_another = None
        assert (as_another == bytes(part)) == (not codec.seals)
        assert decoded(begun(codec, _BLOCK), memoryview(stored), geometry) == bytes(part)


def begun(codec: Codec, block: bytes = _BLOCK) -> Codec:
    """Tell a sealing codec which block comes, as the core does; returns it."""
    if codec.seals:
        codec.begin(_NAMESPACE, block)
    return codec


def decoded(codec: Codec, stored: memoryview, geometry: SegmentGeometry) -> bytes:
    """Decode into guarded memory; checks that nothing beside the segment is written."""
    memory = bytearray(b"\xa5" * (geometry.raw_bytes + 2 * _GUARD))
    target = memoryview(memory)[_GUARD : _GUARD + geometry.raw_bytes]
    segment = codec.open_segment(stored, geometry)
    assert bytes(target) == b"\xa5" * geometry.raw_bytes, "open_segment wrote before write_into was called"
    segment.write_into(target)
    assert memory[:_GUARD] == memory[-_GUARD:] == b"\xa5" * _GUARD
    return bytes(target)
