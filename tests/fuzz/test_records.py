"""Hostile records: the very block that was put, or a miss that takes no memory."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import blocks_decode
from kvstore import record as record_module
from kvstore.errors import CORRUPT_REASONS
from kvstore.record_tags import RecordTags
from tests.fuzz import hostile_million, hostile_records, mutate
from tests.fuzz.reference import HEADER_BYTES, block_in
from tests.fuzz.worlds import FOREIGN_RING, KNOWN, LARGE, UNKNOWN, WORLDS, sound

SMALL = [i for i in range(len(WORLDS)) if i not in LARGE]
QUIET = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("index", range(len(WORLDS)))
def test_a_sound_record_is_delivered_exactly_and_to_no_one_else(index: int) -> None:
    here = sound(index)
    for digest, record in here.records.items():
        assert hostile_records.examine(index, digest, record) == "exact"
        assert block_in(here.world, record) == here.blocks[digest]
    a, b = here.records.values()
    assert hostile_records.examine(index, KNOWN[0], b) == "key"
    assert hostile_records.examine(index, UNKNOWN, a) == "key"


@QUIET
@given(rng=st.randoms(use_true_random=False), index=st.sampled_from(SMALL))
def test_a_damaged_record_is_the_very_block_or_a_miss(rng: random.Random, index: int) -> None:
    here = sound(index)
    other = sound(rng.choice(SMALL)).records[KNOWN[1]]
    record = mutate.damaged(rng, mutate.base_record(rng, here.world, here.records), other)
    outcome = hostile_records.examine(index, mutate.asked(rng), record)
    assert outcome in {"exact", "forged", *CORRUPT_REASONS}


@pytest.mark.parametrize("index", [i for i in SMALL if WORLDS[i].keyed])
def test_a_record_made_with_another_key_is_a_miss(index: int) -> None:
    here = sound(index)
    foreign = here.world.make(KNOWN[0], here.blocks[KNOWN[0]], FOREIGN_RING)
    assert hostile_records.examine(index, KNOWN[0], foreign) == "tag"
    forged = mutate.foreign_tags(here.records[KNOWN[0]])
    assert hostile_records.examine(index, KNOWN[0], forged) == "tag"


@QUIET
@given(data=st.binary(max_size=1500))
def test_any_bytes_at_all_are_a_miss(data: bytes) -> None:
    hostile_records.record(data)


def test_thousands_of_hostile_records_break_no_law_and_meet_every_check() -> None:
    tally = hostile_million.run(2500, seed=20, workers=1)
    assert tally.failures == []
    assert tally.outcomes.total() == 2500
    assert set(tally.outcomes) == {"exact", "forged", *CORRUPT_REASONS}
    assert tally.peak_bytes <= hostile_records.CONSTANT_BYTES


def test_a_run_is_repeated_by_its_seed() -> None:
    first, again, other = (hostile_million.run(300, seed=seed, workers=1) for seed in (3, 3, 4))
    assert first.outcomes == again.outcomes != other.outcomes


def test_the_rows_of_a_forged_table_take_no_memory() -> None:
    """65,536 rows, each of which would be a tuple, in a record whose checksums are right."""
    record, n = sound(0).records[KNOWN[0]], 1 << 16
    head = bytearray(record[:HEADER_BYTES])
    struct.pack_into("<I", head, 124, n)
    forged = mutate.refitted(bytes(head) + struct.pack("<IIQ", 1, 1, 0) * n + bytes(n))
    assert hostile_records.examine(0, KNOWN[0], forged) == "length"
    tracemalloc.start()
    try:
        taken = hostile_records.allocated_bytes(0, KNOWN[0], forged)
    finally:
        tracemalloc.stop()
    assert taken <= hostile_records.allocation_limit(0)


class AnyNumber(int):
    """Equals every checksum."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def trusting(tags: RecordTags, head: memoryview, *, keyed: bool) -> bytes:
    return tags.writing


SKIPPED: dict[str, list[tuple[object, str, object]]] = {
    "segment checksums": [(blocks_decode, "xxh3_64_intdigest", lambda _: AnyNumber())],
    "header checksum": [(record_module, "_header_checksum", lambda *_: AnyNumber())],
    "both kinds of tags": [
        (RecordTags, "authenticate", trusting),
        (blocks_decode, "check_segment", lambda *_: None),
    ],
}


@pytest.mark.parametrize("skipped", SKIPPED)
def test_a_reader_that_skips_a_check_is_found_out(monkeypatch: pytest.MonkeyPatch, skipped: str) -> None:
    """The laws can fail: the same hostile records break none with the check, and one without it."""
    assert hostile_million.run(2000, seed=5, workers=1).failures == []
    for patch in SKIPPED[skipped]:
        monkeypatch.setattr(*patch)
    assert hostile_million.run(2000, seed=5, workers=1).failures
