"""Runs become packs and are found again, with few requests, wherever they were cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.backend import BackendContext, PutHint, PutItem
from kvstore.objects.writer import pieces_of
from kvstore.types import Presence, PutStatus, ReadStatus
from tests.unit.objects.conftest import Opener
from tests.unit.objects.mem import MemBackend, MemMedium, call_for, chain, content, items_of, put, read

PROMPT = chain("prompt", 2048)  # 32k tokens in blocks of 16


@pytest.fixture(scope="module")
def stored() -> MemMedium:
    """A medium that holds the whole prompt."""
    medium = MemMedium()
    backend = MemBackend(medium)
    backend.open(BackendContext(tier="mem", options=None, block_bytes=300))
    for k in range(0, len(PROMPT), 16):
        assert set(put(backend, items_of(PROMPT, k, k + 16))) == {PutStatus.STORED}
    backend.close()
    return medium


def test_a_32k_token_prompt_is_128_writes(stored: MemMedium) -> None:
    assert stored.count["write"] == 128
    assert stored.count["head"] == stored.count["read"] == 0
    assert {s.blocks for s in stored.records().values()} == {16}


def test_a_32k_token_prompt_is_128_reads_and_no_head(opener: Opener, stored: MemMedium) -> None:
    backend = opener(MemMedium(stored.objects))
    assert read(backend, PROMPT, call_for(PROMPT)) == [content(name) for name in PROMPT]
    assert backend.medium.count == {"read": 128}


@pytest.mark.parametrize("there", [2048, 2047, 1600, 1000, 333, 17, 16, 15, 1, 0])
def test_the_stored_part_of_a_32k_token_prompt_is_found_in_few_rounds(opener: Opener, there: int) -> None:
    medium = MemMedium()
    writer = opener(medium)
    put(writer, items_of(PROMPT, 0, there)) if there else None
    backend = opener(MemMedium(medium.objects), settings={"threads": 16})
    rounds: list[int] = []
    look = backend._session.finder.look  # type: ignore[union-attr]

    def counted(ends: Sequence[bytes], call: object) -> object:
        rounds.append(len(ends))
        return look(ends, call)  # type: ignore[arg-type]

    backend._session.finder.look = counted  # type: ignore[union-attr,method-assign]
    found = backend.exists_many(PROMPT, call_for(PROMPT, leading_only=True))
    assert found == [Presence.PRESENT] * there + [Presence.ABSENT] * (2048 - there)
    assert len(rounds) <= 4
    assert max(rounds) <= 16
    assert len(rounds) == 1 or there < 2048
    assert backend.medium.count["read"] == 0


def test_a_prompt_that_was_seen_is_looked_up_without_a_request(opener: Opener, stored: MemMedium) -> None:
    backend = opener(MemMedium(stored.objects))
    read(backend, PROMPT, call_for(PROMPT))
    backend.medium.count.clear()
    assert set(backend.exists_many(PROMPT, call_for(PROMPT, leading_only=True))) == {Presence.PRESENT}
    assert set(put(backend, items_of(PROMPT, 0, 64))) == {PutStatus.EXISTS}
    assert not backend.medium.count


def test_turns_of_a_conversation_are_found(opener: Opener, medium: MemMedium) -> None:
    names = chain("turns", 120)
    ends = [5, 6, 21, 22, 30, 47, 48, 90, 120]
    for start, stop in zip([0, *ends], ends, strict=False):
        assert set(put(opener(medium), items_of(names, start, stop))) == {PutStatus.STORED}
        whole = names[:stop]
        backend = opener(MemMedium(medium.objects))
        assert backend.exists_many(whole, call_for(whole, leading_only=True)) == [Presence.PRESENT] * stop
        backend = opener(MemMedium(medium.objects))
        assert read(backend, whole, call_for(whole, leading_only=True)) == [content(name) for name in whole]


cuts = st.lists(st.tuples(st.integers(0, 69), st.integers(1, 40)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts, st.sampled_from([1, 4, 16]), st.booleans(), st.booleans(), st.integers(0, 69), st.integers(1, 70))
def test_runs_put_at_any_cuts_are_found_again(
    opener: Opener, parts: list[tuple[int, int]], pack: int, tells: bool, together: bool, start: int, n: int
) -> None:
    names = chain("any", 70)
    medium = MemMedium(tells_blocks=tells)
    held: set[int] = set()
    writer = opener(medium, settings={"pack_blocks": pack})
    for first, blocks in parts:
        stop = min(70, first + blocks)
        writer = writer if together else opener(medium, settings={"pack_blocks": pack})
        statuses = put(writer, items_of(names, first, stop))
        assert set(statuses) <= {PutStatus.STORED, PutStatus.EXISTS}
        held.update(range(first, stop))
    reader = opener(medium, settings={"pack_blocks": pack})
    expected = [content(name) if k in held else None for k, name in enumerate(names)]
    presence = [Presence.PRESENT if k in held else Presence.ABSENT for k in range(70)]
    assert reader.exists_many(names, call_for(names)) == presence
    assert read(opener(medium, settings={"pack_blocks": pack}), names, call_for(names)) == expected
    part = slice(start, min(70, start + n))
    some = opener(medium, settings={"pack_blocks": pack})
    assert read(some, names[part], call_for(names)) == expected[part]
    leading = opener(medium, settings={"pack_blocks": pack}).exists_many(names, call_for(names, leading_only=True))
    first_hole = presence.index(Presence.ABSENT) if Presence.ABSENT in presence else 70
    if held == set(range(first_hole)):  # what the search assumes: a stored block says the earlier ones are
        assert leading == presence


def test_a_run_from_the_middle_finds_packs_that_began_before_it(opener: Opener, stored: MemMedium) -> None:
    names = PROMPT[21:75]
    backend = opener(MemMedium(stored.objects))
    assert read(backend, names, call_for(names, 21))[:43] == [content(name) for name in names][:43]
    assert backend.exists_many(names[:20], call_for(names, 21)) == [Presence.PRESENT] * 20


def test_a_diverging_prompt_finds_the_whole_packs_of_the_common_part(opener: Opener, stored: MemMedium) -> None:
    mixed = PROMPT[:40] + chain("other", 40)
    backend = opener(MemMedium(stored.objects))
    found = backend.exists_many(mixed, call_for(mixed, leading_only=True))
    assert found == [Presence.PRESENT] * 32 + [Presence.ABSENT] * 48
    read(backend, PROMPT[:48], call_for(PROMPT[:48]))  # it now remembers what lies in the third pack
    assert read(backend, mixed, call_for(mixed)) == [content(name) for name in PROMPT[:40]] + [None] * 40
    found = backend.exists_many(mixed, call_for(mixed, leading_only=True))
    assert found.count(Presence.PRESENT) == 40


def test_without_a_run_records_are_found_one_by_one(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    items = [PutItem(name, [content(name)]) for name in PROMPT[:20]]
    assert put(backend, items) == [PutStatus.STORED] * 20
    assert len(medium.records()) == 20
    backend = opener(MemMedium(medium.objects))
    assert read(backend, PROMPT[:25]) == [content(name) for name in PROMPT[:20]] + [None] * 5
    assert backend.medium.count["read"] == 25


def test_items_are_grouped_by_parent_not_by_position(opener: Opener, medium: MemMedium) -> None:
    a, b = chain("a", 32), chain("b", 32)
    mixed = [item for pair in zip(items_of(a, 0, 32), items_of(b, 0, 32), strict=True) for item in pair]
    assert set(put(opener(medium), mixed)) == {PutStatus.STORED}
    assert len(medium.records()) == 4
    for names in (a, b):
        assert read(opener(medium), names, call_for(names)) == [content(name) for name in names]


def test_positions_without_the_right_parent_make_no_pack() -> None:
    names = chain("torn", 4)
    torn = [PutItem(name, [b"x"], PutHint(parent=names[0], position=k)) for k, name in enumerate(names)]
    assert sorted(len(piece.items) for piece in pieces_of(torn, 16)) == [1, 1, 2]
    strangers = [PutItem(b"short%d" % k, [b"x"], PutHint(parent=b"short%d" % (k - 1), position=k)) for k in range(4)]
    assert [len(piece.items) for piece in pieces_of(strangers, 16)] == [1] * 4


def test_a_pack_is_no_larger_than_its_bound() -> None:
    names = chain("large", 16)
    big = bytes(3 << 20)
    items = [PutItem(n, [big], PutHint(parent=names[k - 1] if k else b"", position=k)) for k, n in enumerate(names)]
    pieces = pieces_of(items, 16)
    assert [len(piece.items) for piece in pieces] == [8, 8]
    assert all(piece.nbytes <= 32 << 20 for piece in pieces)


@pytest.mark.parametrize(("block_bytes", "pack"), [(300, 16), (2 << 20, 16), (3 << 20, 8), (4 << 20, 1), (64 << 20, 1)])
def test_blocks_decide_the_size_of_a_pack(opener: Opener, block_bytes: int, pack: int) -> None:
    shape = opener(block_bytes=block_bytes).batch_shape()
    assert shape.align == shape.blocks == pack
    assert shape.nbytes >= pack * block_bytes


def test_the_end_of_a_run_that_was_put_alone_gives_way_to_the_pack(opener: Opener, medium: MemMedium) -> None:
    names = chain("grows", 16)
    put(opener(medium), items_of(names, 14, 16))
    assert set(put(opener(medium), items_of(names, 0, 16))) == {PutStatus.STORED}
    assert [s.blocks for s in medium.records().values()] == [16]
    assert set(put(opener(medium), items_of(names, 14, 16))) == {PutStatus.EXISTS}
    assert read(opener(medium), names, call_for(names)) == [content(name) for name in names]


def test_a_leading_read_stops_behind_a_hole_and_reads_in_parallel(opener: Opener, stored: MemMedium) -> None:
    backend = opener(MemMedium(dict(stored.objects), latency_s=0.002), settings={"threads": 8})
    hole = 20
    del backend.medium.objects[next(k for k in backend.medium.objects if PROMPT[hole * 16 + 15][17:].hex() in k)]
    buffers: dict[int, bytearray] = {}

    def place(i: int, info: object) -> list[memoryview]:
        buffers[i] = bytearray(300)
        return [memoryview(buffers[i])]

    statuses = backend.read_many(PROMPT, place, lambda _: None, call_for(PROMPT, leading_only=True))
    assert statuses[: hole * 16] == [ReadStatus.OK] * (hole * 16)
    assert statuses[hole * 16] is ReadStatus.ABSENT
    assert set(statuses[hole * 16 + 1 :]) <= {ReadStatus.OK, ReadStatus.SKIPPED}
    assert backend.medium.count["read"] <= 80  # of 128; how far the others get while one waits is up to the machine
    assert 2 < backend.medium.most_at_once <= 9
