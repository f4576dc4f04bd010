"""Deleting, dropping, collecting, listing; epochs and descriptions."""

from __future__ import annotations

import time

import pytest

from kvstore.backend import PutItem
from kvstore.errors import BackendUnavailableError
from kvstore.objects.naming import key_of
from kvstore.types import Call, Presence, PutStatus
from tests.unit.objects.conftest import Opener
from tests.unit.objects.mem import PREFIX, MemMedium, call_for, chain, content, items_of, put, read

NAMES = chain("removing", 48)
EXPECTED = [content(name) for name in NAMES]


def wait_for(law: object) -> None:
    deadline = time.monotonic() + 5.0
    while not law():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_deleting_a_block_takes_its_pack_and_says_so(opener: Opener, medium: MemMedium) -> None:
    removed: list[bytes] = []
    backend = opener(medium, removed=removed.extend)
    put(backend, items_of(NAMES, 0, 48))
    assert backend.delete_many([NAMES[20], NAMES[20], NAMES[21]], call_for(NAMES)) == 2
    assert sorted(removed) == sorted(set(NAMES[16:32]) - {NAMES[20], NAMES[21]})
    assert read(backend, NAMES, call_for(NAMES)) == [*EXPECTED[:16], *[None] * 16, *EXPECTED[32:]]
    assert backend.usage().records == 32
    assert backend.delete_many([NAMES[20]], call_for(NAMES)) == 0


def test_deleting_a_block_takes_every_copy_of_it(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 3))
    put(opener(medium), items_of(NAMES, 0, 8))
    put(opener(medium), items_of(NAMES, 0, 16))
    put(opener(medium), items_of(NAMES, 16, 32))
    assert len(medium.records()) == 5
    assert opener(medium).delete_many([NAMES[2]], call_for(NAMES)) == 1
    assert read(opener(medium), NAMES[:3], call_for(NAMES[:3])) == [None] * 3 or key_of(NAMES[1]) in medium.objects
    for stop in (3, 8, 16, 32):
        assert read(opener(medium), NAMES[:stop], call_for(NAMES[:stop]))[2] is None
    assert read(opener(medium), NAMES[16:32], call_for(NAMES)) == EXPECTED[16:32]


def test_a_whole_run_is_deleted_in_few_requests(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 48))
    backend = opener(MemMedium(medium.objects))
    assert backend.delete_many(NAMES, call_for(NAMES)) == 48
    assert backend.medium.count == {"head": 3, "remove": 1}
    assert not medium.records()


def test_a_delete_that_cannot_be_done_raises(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    put(backend, items_of(NAMES, 0, 16))
    medium.fault = lambda op, _: BackendUnavailableError("down") if op == "remove" else None
    with pytest.raises(BackendUnavailableError):
        backend.delete_many(NAMES[:16], call_for(NAMES))


def test_discarding_a_record_condemns_its_pack(opener: Opener, medium: MemMedium) -> None:
    removed: list[bytes] = []
    backend = opener(medium, removed=removed.extend)
    put(backend, items_of(NAMES, 0, 16))
    read(backend, NAMES[:16], call_for(NAMES))
    backend.discard(NAMES[3], 12345)
    assert len(medium.records()) == 1
    read(backend, NAMES[:16], call_for(NAMES))
    backend.discard(NAMES[3], int.from_bytes(EXPECTED[3][184:192], "little"))
    assert not medium.records()
    assert sorted(removed) == sorted(set(NAMES[:16]) - {NAMES[3]})
    assert set(backend.exists_many(NAMES[:16], call_for(NAMES))) == {Presence.ABSENT}


def test_a_drop_is_reclaimed_bit_by_bit_and_after_a_restart(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    other = [bytes(16) + b"\x01" + bytes([k]) * 32 for k in range(4)]
    put(backend, items_of(NAMES, 0, 48))
    put(backend, [PutItem(name, [b"x"]) for name in [*other, PREFIX + b"odd", b"odd"]])
    backend.drop(PREFIX[:16])
    assert [key for key in medium.objects if key.startswith("drops/")]
    backend.close()
    later = opener(medium)
    for _ in range(300):
        later.maintain()
        if not [key for key in medium.objects if key.startswith("drops/")]:
            break
    assert read(later, NAMES, call_for(NAMES)) == [None] * 48
    assert read(later, [*other, PREFIX + b"odd", b"odd"]) == [b"x"] * 4 + [None, b"x"]
    assert not [key for key in medium.objects if key.startswith("drops/")]


def test_what_is_put_after_a_drop_stays(opener: Opener) -> None:
    now = [1000.0]
    medium = MemMedium(clock=lambda: now[0])
    backend = opener(medium)
    put(backend, items_of(NAMES, 0, 16))
    backend.drop(PREFIX[:16])
    now[0] += 10.0
    put(backend, items_of(NAMES, 16, 32))
    for _ in range(300):
        backend.maintain()
    assert read(backend, NAMES[:32], call_for(NAMES[:32])) == [None] * 16 + EXPECTED[16:32]


def test_scan_lists_each_record_once(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 5))
    put(opener(medium), items_of(NAMES, 0, 16))
    put(opener(medium), [PutItem(b"short", [b"abc", b"defg"])])
    medium.objects["aa/" + "0" * 32 + "/01aa" + "0" * 62] = next(iter(medium.objects.values()))  # misplaced
    medium.objects["foreign.txt"] = next(iter(medium.objects.values()))
    listed = {info.name: (info.head_bytes, info.nbytes) for info in opener(medium).scan()}
    assert listed == {**dict.fromkeys(NAMES[:16], (100, 300)), b"short": (3, 7)}
    names = [info.name for info in opener(medium).scan()]
    assert len(names) == len(set(names)) == 17


def test_scan_tells_of_a_medium_that_is_down(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 16))
    medium.fault = lambda op, _: BackendUnavailableError("down") if op == "read" else None
    with pytest.raises(BackendUnavailableError):
        list(opener(medium).scan())


def test_collecting_removes_the_old_then_the_oldest(opener: Opener) -> None:
    now = [time.time() - 1000.0]
    medium = MemMedium(clock=lambda: now[0])
    backend = opener(medium)
    for k in range(0, 48, 16):
        put(backend, items_of(NAMES, k, k + 16))
        now[0] += 300.0
    assert backend.gc(max_age_s=800.0)[0] == 16
    assert read(backend, NAMES, call_for(NAMES)) == [None] * 16 + EXPECTED[16:]
    records, nbytes = backend.gc(max_bytes=9000)
    assert records == 16
    assert nbytes > 16 * 300
    assert read(backend, NAMES, call_for(NAMES)) == [None] * 32 + EXPECTED[32:]
    assert backend.gc(max_bytes=9000) == (0, 0)
    assert backend.gc(max_bytes=0)[0] == 16


def test_epochs_are_made_once_and_shared(opener: Opener, medium: MemMedium) -> None:
    a, b = opener(medium), opener(medium, settings={"epoch_age_s": 0.0})
    first = a.epoch(b"n" * 16)
    assert b.epoch(b"n" * 16) == first
    reads = medium.count["read"]
    assert {a.epoch(b"n" * 16) for _ in range(50)} == {first}
    assert medium.count["read"] == reads
    second = a.epoch(b"n" * 16, bump=True)
    assert second != first
    assert a.epoch(b"n" * 16) == second
    assert b.epoch(b"n" * 16) == second
    third = b.epoch(b"n" * 16, bump=True)
    wait_for(lambda: a.epoch(b"n" * 16) == third)
    medium.objects["epochs/" + (b"n" * 16).hex()].data = b"damaged epoch"
    repaired = b.epoch(b"n" * 16)
    assert len(repaired) == 8
    assert b.epoch(b"n" * 16) == repaired


def test_a_lost_race_for_an_epoch_takes_the_winner(opener: Opener, medium: MemMedium) -> None:
    backend, rival = opener(medium), opener(medium)
    won: list[bytes] = []

    def race(operation: str, key: str) -> None:
        if operation == "write" and key.startswith("epochs/") and not won:
            won.append(b"")
            won[0] = rival.epoch(b"r" * 16)

    medium.fault = race
    assert backend.epoch(b"r" * 16) == won[0]


def test_the_description_of_a_namespace_lies_beside_the_records(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium, namespace=b"d" * 16, namespace_json='{"model": "m"}')
    key = f"namespaces/{(b'd' * 16).hex()}.json"
    assert key not in medium.objects
    assert put(backend, items_of(NAMES, 0, 2)) == [PutStatus.STORED] * 2
    wait_for(lambda: key in medium.objects)
    assert medium.objects[key].data == b'{"model": "m"}'
    assert backend.exists_many(NAMES[:2], Call.within(9.0)) == [Presence.PRESENT] * 2


def test_larger_packs_of_others_are_listed_and_kept(opener: Opener, medium: MemMedium) -> None:
    names = chain("larger", 256)
    put(opener(medium, settings={"pack_blocks": 256}), items_of(names, 0, 256))
    ours = opener(medium, settings={"pack_blocks": 4})
    assert {info.name for info in ours.scan()} == set(names)
    ours.discard(names[255], 1)
    assert read(ours, names, call_for(names)).count(None) == 0  # the last one's pack holds them all
    assert len(medium.records()) == 1
