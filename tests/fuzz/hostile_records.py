"""The law of records: whatever stands where a record should, a reader delivers the very block or a miss."""

from __future__ import annotations

import tracemalloc
from typing import Final

from kvstore.errors import CORRUPT_REASONS, CorruptRecordError
from kvstore.record import parse_head, verify_record
from tests.fuzz import mutate, reference
from tests.fuzz.worlds import KNOWN, UNKNOWN, WORLDS, Sound, sound

GUARD: Final = b"\xaa" * 64
ASKED: Final = (*KNOWN, UNKNOWN)
CONSTANT_BYTES: Final = 64 << 10
"""What reading may take besides the size of one block: tables, views, messages."""


def record(data: bytes) -> None:
    """Byte 0 names the world, byte 1 the block that is asked for; the rest stands where its record should."""
    if len(data) < 2:
        return
    examine(data[0] % len(WORLDS), ASKED[data[1] % len(ASKED)], data[2:])


def examine(world_index: int, digest: bytes, stored: bytes) -> str:
    """Read ``stored`` for a block in every way there is; return what came of it.

    Returns:
        ``"exact"`` when the block was delivered that was put; ``"forged"`` when another one was, from
        a record whose maker knew what the checksums are, in a world without keys; else the reason of
        the miss.
    """
    here = sound(world_index)
    here.memory[:] = b"\xaa" * len(here.memory)
    inside = memoryview(here.memory)[64:-64]
    reason = ""
    try:
        opened = here.reader.open(memoryview(stored), digest)
    except CorruptRecordError as error:
        reason = error.reason
        assert reason in CORRUPT_REASONS
    else:
        assert opened.head.digest == digest
        opened.write_into(inside)
    finally:
        here.reader.recycle()
    assert here.memory[:64] == here.memory[-64:] == GUARD, "written outside the destination"
    _segment_by_segment(here, digest, stored, reason)
    if reason:
        assert here.memory.count(0xAA) == len(here.memory), "a miss touched the destination"
        return reason
    return _delivered(here, digest, stored, bytes(inside))


def _delivered(here: Sound, digest: bytes, stored: bytes, block: bytes) -> str:
    world = here.world
    assert verify_record(memoryview(stored)) == parse_head(memoryview(stored))
    assert mutate.refitted(stored) == stored, "a checksum is wrong"
    assert block == reference.block_in(world, stored), "not what the record holds"
    if block == here.blocks.get(digest):
        return "exact"
    sealed = reference.field(stored, "flags") & reference.FLAG_SEALED
    assert not world.keyed, "a block that was made without the key"
    assert not sealed, "another block than the one that was encrypted"
    honest = here.records.get(digest)
    assert honest is None or _content(honest) != _content(stored)
    return "forged"


def _content(record: bytes) -> tuple[int, list[bytes]]:
    return reference.field(record, "codec"), reference.segments(record)


def _segment_by_segment(here: Sound, digest: bytes, stored: bytes, reason: str) -> None:
    """Read the head, then every segment alone, as a layer-wise restore does."""
    parts = []
    miss = ""
    try:
        table = here.reader.open_head(memoryview(stored), digest)
        for i, (start, stop) in enumerate(table.spans):
            segment = here.reader.open_segment(table, i, memoryview(stored)[start:stop])
            out = bytearray(reference.cut(here.world.spec)[i][2])
            segment.write_into(memoryview(out))
            parts.append(bytes(out))
    except CorruptRecordError as error:
        miss = str(error)
    finally:
        here.reader.recycle()
    if miss:
        assert reason, f"whole it is a hit, in parts a miss: {miss}"
    elif reason:  # its token ids are damaged, or what follows
        assert b"".join(parts) == reference.block_in(here.world, stored)
    else:
        assert b"".join(parts) == bytes(memoryview(here.memory)[64:-64])


def allocated_bytes(world_index: int, digest: bytes, stored: bytes) -> int:
    """Most memory that reading takes at once, with all tracing on; the destination is the caller's."""
    here = sound(world_index)
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    try:
        here.reader.open(memoryview(stored), digest).write_into(memoryview(here.memory)[64:-64])
    except CorruptRecordError:
        pass
    finally:
        here.reader.recycle()
    return tracemalloc.get_traced_memory()[1] - before


def allocation_limit(world_index: int) -> int:
    """What :func:`allocated_bytes` may say: a block, and where it is sealed as much again for the decrypted bytes."""
    world = WORLDS[world_index]
    return (1 + world.sealed) * world.spec.nbytes + CONSTANT_BYTES
