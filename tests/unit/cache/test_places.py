"""Records read straight into memory of the cache, and media that do it wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore import BackendUnavailableError, BlockSpec, BlockStatus, Presence
from kvstore.backend import Place, RecordInfo
from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import Codec, OpenSegment
from kvstore.l2.landing import Frames, Landing, RecordShape
from kvstore.l2.receiver import Placer
from kvstore.none_codec import NoneCodec
from kvstore.record import RecordMeta
from kvstore.segments import SegmentGeometry
from kvstore.types import Call, ReadStatus
from tests import doubles
from tests.support import MakeKey, OpenDouble, blocks_of, same_bytes
from tests.unit.cache.reading import Misbehaving, free_slots, l1_of, stored

PAGE = 4096


def test_a_raw_record_is_read_into_its_slot_and_never_copied(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    medium = doubles.PlacingBackend()
    cache = open_double(lambda: medium, l1={"capacity": "4MiB"}, codec="none")
    key, blocks = make_key(9), blocks_of(spec, 9)
    stored(cache, key, blocks)

    with cache.acquire(key) as lease:
        blocks_at = {t.data_ptr() for t in lease.tensors}
        assert all(same_bytes(t, b) for t, b in zip(lease.tensors, blocks, strict=True))

    assert {address + info.head_bytes for info, address in medium.infos} == blocks_at


@pytest.mark.parametrize("l1", [{"enabled": False}, {"capacity": "4MiB"}], ids=["no L1", "L1"])
@pytest.mark.parametrize("codec", ["none", "planes"])
def test_every_place_has_its_payload_on_a_page(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, codec: str, l1: dict[str, Any]
) -> None:
    medium = doubles.PlacingBackend()
    cache = open_double(lambda: medium, l1=l1, codec=codec)
    key = make_key(9)
    blocks = torch.randn((9, *spec.shape), generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    stored(cache, key, blocks)

    assert cache.get(key, torch.zeros_like(blocks)) == 9

    assert len(medium.infos) == 9
    assert all(info.codec_id == (codec != "none") * medium.infos[0][0].codec_id for info, _ in medium.infos)
    assert {(address + info.head_bytes) % PAGE for info, address in medium.infos} == {0}


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_a_medium_that_knows_lengths_only_can_read_into_places(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, codec: str
) -> None:
    medium = doubles.PlacingBackend()
    medium.knows_heads = False
    cache = open_double(lambda: medium, l1={"capacity": "4MiB"}, codec=codec)
    key = make_key(9)
    blocks = torch.randn((9, *spec.shape), generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    stored(cache, key, blocks)
    out = torch.zeros_like(blocks)

    assert cache.get(key, out) == 9
    assert same_bytes(out, blocks)


class Boasting(doubles.PlacingBackend):
    """Tells impossible lengths of one record."""

    lie: Callable[[RecordInfo], RecordInfo] = staticmethod(lambda info: info)
    liar = b""

    def info(self, name: bytes, data: bytes) -> RecordInfo:
        info = super().info(name, data)
        return self.lie(info) if name.endswith(self.liar) else info


@pytest.mark.parametrize(
    "lengths", [(208, 1 << 62), (0, 1 << 40), (1 << 40, 5), (-5, 100), (208, -1)], ids=lambda x: f"{x[0]}+{x[1]}"
)
def test_an_impossible_length_is_a_corrupt_record_and_takes_no_memory(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, lengths: tuple[int, int]
) -> None:
    medium = Boasting()
    cache = open_double(lambda: medium, l1={"capacity": "4MiB"})
    key, blocks = make_key(6), blocks_of(spec, 6)
    stored(cache, key, blocks)
    medium.liar, medium.lie = key[2], lambda info: RecordInfo(info.name, *lengths)
    out = torch.zeros_like(blocks)

    statuses = cache.get_each(key, out)

    assert statuses == [BlockStatus.CORRUPT if i == 2 else BlockStatus.DELIVERED for i in range(6)]
    assert [address for info, address in medium.infos if info.name.endswith(key[2])] == [0]
    assert cache.stats().tiers[0].counters.corrupt == 1
    assert cache.contains_each(key)[2] is Presence.ABSENT, "it is not offered again"
    assert cache.get(key, out) == 2


def test_a_damaged_record_in_its_slot_is_a_miss_that_leaves_nothing_behind(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    medium = doubles.PlacingBackend()
    cache = open_double(lambda: medium, l1={"capacity": "2MiB"})
    key, blocks = make_key(8), blocks_of(spec, 8)
    stored(cache, key, blocks)
    name = next(n for n in medium._records if n.endswith(key[3]))
    data = bytearray(medium._records[name][0])
    data[-7] ^= 4
    medium._records[name] = (bytes(data), 0.0)
    out = torch.full_like(blocks, 7.0)

    assert cache.get(key, out) == 3
    assert same_bytes(out[:3], blocks[:3])
    assert same_bytes(out[3:], torch.full_like(blocks, 7.0)[3:])
    assert name not in medium._records
    assert cache.stats().tiers[0].counters.corrupt == 1
    assert free_slots(l1_of(cache)) == l1_of(cache).pool.n_slots


def _raises_in_the_middle(medium: Misbehaving, names: Sequence[bytes], place: Place, done: Any, call: Call) -> Any:
    medium.well(names[:3], place, done)
    raise RuntimeError("broken")


def _gives_up_between_place_and_done(
    medium: Misbehaving, names: Sequence[bytes], place: Place, done: Any, call: Call
) -> Any:
    medium.well(names[:3], place, done)
    place(3, medium.info(names[3], medium._records[names[3]][0]))
    raise BackendUnavailableError("the device went away")


def _answers_short(medium: Misbehaving, names: Sequence[bytes], place: Place, done: Any, call: Call) -> Any:
    return medium.well(names[:3], place, done)


def _answers_none(medium: Misbehaving, names: Sequence[bytes], place: Place, done: Any, call: Call) -> Any:
    medium.well(names[:3], place, done)


@pytest.mark.parametrize("l1", [{"enabled": False}, {"capacity": "4MiB"}], ids=["no L1", "L1"])
@pytest.mark.parametrize(
    "act", [_raises_in_the_middle, _gives_up_between_place_and_done, _answers_short, _answers_none]
)
def test_what_was_verified_before_a_medium_broke_counts(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, act: Any, l1: dict[str, Any]
) -> None:
    medium = Misbehaving()
    cache = open_double(lambda: medium, l1=l1)
    key, blocks = make_key(8), blocks_of(spec, 8)
    stored(cache, key, blocks)
    medium.act = act.__get__(medium)
    out = torch.full_like(blocks, 7.0)

    assert cache.get(key, out) == 3

    assert same_bytes(out[:3], blocks[:3])
    assert same_bytes(out[3:], torch.full_like(blocks, 7.0)[3:])
    counters = cache.stats().tiers[0].counters
    assert counters.io_errors == 1
    assert (counters.lookups, counters.hits, counters.misses) == (8, 3, 5)
    if l1.get("enabled", True):
        assert free_slots(l1_of(cache)) == l1_of(cache).pool.n_slots
    medium.act = None
    assert cache.get(key, out) == 8
    assert same_bytes(out, blocks)


def _done_without_place(medium: Misbehaving, names: Sequence[bytes], place: Place, done: Any, call: Call) -> Any:
    for i in range(len(names)):
        done(i)
    return [ReadStatus.OK] * len(names)


def _skips_everything(medium: Misbehaving, names: Sequence[bytes], place: Place, done: Any, call: Call) -> Any:
    return [ReadStatus.SKIPPED] * len(names)


def _places_and_forgets(medium: Misbehaving, names: Sequence[bytes], place: Place, done: Any, call: Call) -> Any:
    for i, name in enumerate(names):
        place(i, medium.info(name, medium._records[name][0]))
    return [ReadStatus.OK] * len(names)


@pytest.mark.parametrize("act", [_done_without_place, _skips_everything, _places_and_forgets])
def test_what_was_never_delivered_is_a_miss(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey, act: Any
) -> None:
    medium = Misbehaving()
    cache = open_double(lambda: medium, l1={"capacity": "4MiB"})
    key, blocks = make_key(5), blocks_of(spec, 5)
    stored(cache, key, blocks)
    medium.act = act.__get__(medium)
    out = torch.full_like(blocks, 7.0)

    assert cache.get(key, out) == 0
    assert cache.get_each(key, out) == [BlockStatus.ABSENT] * 5

    assert same_bytes(out, torch.full_like(blocks, 7.0))
    assert free_slots(l1_of(cache)) == l1_of(cache).pool.n_slots


def test_a_record_is_placed_and_taken_once(open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey) -> None:
    second: list[object] = []

    def act(names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call) -> list[ReadStatus]:
        statuses = medium.well(names, place, done)
        for i, name in enumerate(names):
            second.append(place(i, medium.info(name, medium._records[name][0])))
            done(i)
        return statuses

    medium = Misbehaving()
    cache = open_double(lambda: medium, codec="planes")
    key, blocks = make_key(5), blocks_of(spec, 5)
    stored(cache, key, blocks)
    medium.act = act
    out = torch.zeros_like(blocks)

    assert cache.get(key, out) == 5
    assert same_bytes(out, blocks)
    assert second == [None] * 5


def test_what_a_medium_says_after_its_answer_does_not_count(
    open_double: OpenDouble, spec: BlockSpec, make_key: MakeKey
) -> None:
    afterwards: list[Callable[[], object]] = []

    def act(names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call) -> list[ReadStatus]:
        afterwards.append(lambda: place(0, medium.info(names[0], medium._records[names[0]][0])))
        afterwards.append(lambda: done(0))
        return [ReadStatus.ABSENT] * len(names)

    medium = Misbehaving()
    cache = open_double(lambda: medium, l1={"capacity": "4MiB"})
    key, blocks = make_key(2), blocks_of(spec, 2)
    stored(cache, key, blocks)
    medium.act = act
    assert cache.get(key, torch.zeros_like(blocks)) == 0

    assert [tell() for tell in afterwards] == [None, None]
    assert free_slots(l1_of(cache)) == l1_of(cache).pool.n_slots


class _Padded(OpenSegment):
    """Borrows the stored bytes until they are written, as real codecs do."""

    def __init__(self, stored: memoryview, zeros: int) -> None:
        self._stored = stored
        self._zeros = zeros

    def write_into(self, out: memoryview) -> None:
        out[len(self._stored) :] = bytes(self._zeros)
        out[: len(self._stored)] = self._stored


class _CutZeros(Codec):
    """Leaves out so many zeros at the end of a segment that head and token ids make up for them."""

    codec_id = 61
    name = "cut-zeros"
    cut_bytes = 16 + 4 * 64

    def supports(self, spec: BlockSpec) -> bool:
        return spec.block_tokens == 64

    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> bytes:
        return bytes(raw[: -self.cut_bytes])

    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> OpenSegment:
        return _Padded(stored, self.cut_bytes)


@pytest.mark.parametrize("codec_id", [-1, 0, _CutZeros.codec_id])
def test_an_encoded_record_as_long_as_a_raw_one_is_not_decoded_onto_itself(codec_id: int) -> None:
    spec = BlockSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=64, dtype="bfloat16")
    raw = bytes(range(256)) * 6 + bytes(512)
    meta = RecordMeta(digest=bytes(32), token_ids=bytes(4 * 64))
    record = b"".join(BlockEncoder(spec, bytes(16), _CutZeros()).encode(memoryview(raw), meta).buffers)
    shape = RecordShape.of(spec)
    assert len(record) == shape.plain_head_bytes + spec.nbytes
    frames = Frames(shape)
    landing = Landing(frames)
    shelf: Any = SimpleNamespace(
        shape=shape, decoder=lambda: BlockDecoder(spec, bytes(16), {61: _CutZeros(), 0: NoneCodec()}.get)
    )
    placer = Placer(shelf, [b"n"], [bytes(32)], Call.within(10), landing=landing, indices=[0], frames=frames)

    places = placer.place(0, RecordInfo(b"n", 0, len(record), codec_id))
    assert places is not None
    places[0][:] = record
    placer.done(0)

    assert placer.delivered == {0}
    assert bytes(landing.frame(0).block) == raw
