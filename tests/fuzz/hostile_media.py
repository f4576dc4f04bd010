"""What lies on media around records: packs, slots, index lines, LMDB files, archives, object keys, coded segments."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import Final

from kvstore_lmdb.check import FileCheck, UndecidedError
from kvstore_lmdb.entry import Entry as LmdbEntry
from kvstore_lmdb.format import DamagedError, read_meta
from kvstore_nvme.index import Entry as NvmeEntry
from kvstore_nvme.slot import PAGE_BYTES, Slot, is_slot_of
from kvstore_s3 import connection, data_path
from kvstore_s3.errors import S3Error, from_answer

from kvstore.backend import PutItem
from kvstore.cli.archive import ArchiveReader, ArchiveWriter, Document, Parcel, Refused
from kvstore.errors import BackendUnavailableError, ConfigError, CorruptRecordError
from kvstore.objects import cuts, naming, pack
from kvstore.objects.medium import ObjectBody
from kvstore.record import unpack_head
from kvstore.segments import plan_segments
from tests.fuzz import reference
from tests.fuzz.inputs import Choices
from tests.fuzz.worlds import KNOWN, WORLDS, World, codec_named

_CODECS: Final = ("none", "zstd", "planes", "planes-base", "aes-gcm")


class Body(ObjectBody):
    """An object in memory."""

    def __init__(self, data: bytes) -> None:
        self.nbytes = len(data)
        self._stream = io.BytesIO(data)

    def read_into(self, view: memoryview) -> None:
        """Fill ``view``, or say as a medium does that the body ended."""
        if self._stream.readinto(view) < len(view):
            raise BackendUnavailableError("the body ended early")

    def close(self) -> None:
        """Nothing to give back."""


def packs(data: bytes) -> None:
    """An object: the records of a pack that fill it without gap or overlap, or PackError."""
    try:
        entries = pack.read_index(Body(data), len(data))
    except pack.PackError:
        with suppress(pack.PackError, BackendUnavailableError):
            pack.read_index(Body(data), None)  # only a range was read: its end is not known
        return
    at = entries[0].offset
    items = []
    for entry in entries:
        assert entry.offset == at
        assert 0 <= entry.head_bytes <= entry.nbytes
        items.append(PutItem(entry.name, [memoryview(data)[at : entry.end]], head_bytes=entry.head_bytes))
        at = entry.end
    assert at == len(data)
    assert len(pack.seal(items)) == entries[0].offset


def slots(data: bytes) -> None:
    """A page of a segment file: a slot that the index can hold, or none; then a line of each index."""
    page = memoryview(bytearray(data[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")))
    slot = Slot.parse(page)
    if slot is not None:
        entry = NvmeEntry.of(slot, 3, 5)
        assert NvmeEntry.parse(entry.pack()) == entry
        assert slot.front_bytes <= slot.nbytes
        assert 0 <= slot.head_bytes <= slot.nbytes
        assert slot.pages >= 1
        assert is_slot_of(page, slot.name, slot.sequence, (slot.nbytes, slot.front_bytes))
        info = entry.info(slot.name)
        assert info.payload_bytes >= 0
        again = memoryview(bytearray(PAGE_BYTES))
        slot.pack_into(again)
        assert Slot.parse(again) == slot
    assert Slot.parse(page[: PAGE_BYTES - 1]) is None


def lmdb_files(data: bytes) -> None:
    """A database file: sound for all that liblmdb will follow, or DamagedError; in bounded time and memory."""
    fd = os.memfd_create("kvstore-fuzz")
    try:
        os.write(fd, data)
        meta = read_meta(fd)
        if meta.file_bytes <= 16 * len(data) + (1 << 20):  # the guard asks that first
            FileCheck(fd, meta, 0.5).run()
    except (DamagedError, UndecidedError):
        pass
    finally:
        os.close(fd)
    line = LmdbEntry.parse(data[:400])
    assert line.info(b"name").payload_bytes >= 0
    assert LmdbEntry.parse(line.pack(children_bytes=line.children_bytes)) == line


def archives(data: bytes) -> None:
    """A tar: its records, each what its name says, or the reason why not; ConfigError for something else."""
    try:
        reader = ArchiveReader(io.BytesIO(data))
    except ConfigError:
        return
    out = io.BytesIO()
    writer = ArchiveWriter(out)
    taken = 0
    for piece in reader:
        if isinstance(piece, Parcel):
            assert len(piece.data) == piece.head.record_bytes
            assert unpack_head(memoryview(piece.data)) == piece.head
            writer.record(piece)
            taken += 1
        elif isinstance(piece, Document):
            assert len(piece.namespace) == 16
        else:
            assert isinstance(piece, Refused)
            assert piece.reason
    writer.finish()
    second = ArchiveReader(io.BytesIO(out.getvalue()))
    assert sum(isinstance(piece, Parcel) for piece in second) == taken
    assert not second.cut_off


def names(data: bytes) -> None:
    """Stored names as object keys, and sequences cut into packs."""
    choices = Choices(data)
    start, length, pack_blocks = choices.number(2), choices.number(1), 1 << choices.below(8)
    pieces = cuts.cut(start, start + length, pack_blocks)
    at = start
    for first, stop in pieces:
        size = stop - first
        assert first == at
        assert size & (size - 1) == 0 < size <= pack_blocks
        assert first % size == 0
        for position in {first, (first + stop) // 2, stop - 1}:
            assert stop - 1 in cuts.ends_for(position, pack_blocks)
            group = cuts.group_of(position, pack_blocks)
            assert group[0] <= first
            assert stop <= group[1]
        at = stop
    assert at == start + length
    name = choices.rest[: choices.below(80)]
    key = naming.key_of(name)
    assert naming.holds_records(key)
    assert key.isascii()
    assert ".." not in key
    assert naming.name_of(key) == (name if len(name) == naming.NAME_BYTES else None)
    text = choices.rest.decode("utf-8", "replace")
    found = naming.name_of(text)
    assert found is None or naming.key_of(found) == text


def coded(data: bytes) -> None:
    """Byte 0 names the codec, byte 1 a world whose first segment the rest stands for; byte 2 seals the rest first."""
    if len(data) < 4:
        return
    name = _CODECS[data[0] % len(_CODECS)]
    world = WORLDS[data[1] % len(WORLDS)]
    stored = data[3:]
    geometry = plan_segments(world.spec)[0]
    codec = codec_named(name)
    if codec.seals:
        codec.begin(world.namespace, KNOWN[0])
        if data[2] % 2:
            stored = reference.sealed(world, KNOWN[0], stored, data[2] >> 1)
    memory = bytearray(b"\xaa" * (geometry.raw_bytes + 128))
    try:
        codec.open_segment(memoryview(stored), geometry).write_into(memoryview(memory)[64:-64])
        reason = ""
    except CorruptRecordError as error:
        reason = error.reason
    if reason:
        assert reason in {"codec", "tag"}
        assert memory.count(0xAA) == len(memory), "a refused segment touched the destination"
        return
    assert memory[:64] == memory[-64:] == b"\xaa" * 64
    assert bytes(memory[64:-64]) == _expected(world, name, codec.codec_id, stored)


def _expected(world: World, name: str, codec_id: int, stored: bytes) -> bytes:
    place = reference.cut(world.spec)[0]
    if name == "none":
        return stored
    if name == "aes-gcm":
        return reference.unsealed(world, KNOWN[0], stored, place)
    return reference.decoded(world.spec, codec_id, stored, place)


def answers(data: bytes) -> None:
    """The head of a server's answer and the document behind it: sizes that objects have, or S3Error."""
    head, _, document = data.partition(b"\r\n\r\n")
    for method in ("GET", "HEAD"):
        try:
            answer = connection._parse(head, method)
        except S3Error:
            continue
        assert -1 <= answer.nbytes < 1 << 60
        info = data_path.info_from("key", answer.headers, max(0, answer.nbytes))
        assert 0 <= info.modified < 1 << 60
        assert 0 <= info.blocks < 1 << 60
        assert 0 <= data_path.total_of(answer.headers, 7) < 1 << 60
        for span in (data_path.Span(), data_path.Span(3), data_path.Span(0, 100), data_path.Span(50, 60)):
            try:
                skip, wanted = data_path.check_answer(answer.headers, span, max(0, answer.nbytes))
            except S3Error:
                continue
            assert skip >= 0
            assert 0 <= wanted <= max(0, answer.nbytes)
            assert span.stop is None or wanted <= span.stop - span.start
        assert isinstance(from_answer(answer.status, answer.headers, document), S3Error)
