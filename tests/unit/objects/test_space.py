"""Room: within the capacity, oldest first, used ones stay, several processes at once."""

from __future__ import annotations

import threading

import pytest

from kvstore.backend import PutItem
from kvstore.errors import BackendFullError
from kvstore.types import Call, Presence, PutStatus
from tests.unit.objects.conftest import Opener
from tests.unit.objects.mem import MemBackend, MemMedium, call_for, chain, content, items_of, put, read

SWEPT: dict[str, object] = {"evicts": True, "refresh_after_s": 0.0, "positive_ttl_s": 0.0, "negative_ttl_s": 0.0}
KIB = 1 << 10


def stored_bytes(medium: MemMedium) -> int:
    return sum(len(stored.data) for stored in medium.objects.values())


def one(k: int, nbytes: int = KIB) -> PutItem:
    name = chain(f"one{k}", 1)[0]
    return PutItem(name, [content(name, nbytes)])


def present(backend: MemBackend, items: list[PutItem]) -> list[bool]:
    found = backend.exists_many([item.name for item in items], Call.within(9.0))
    return [presence is Presence.PRESENT for presence in found]


def test_puts_stay_within_the_capacity_and_evict_the_oldest(opener: Opener) -> None:
    medium, removed = MemMedium(), list[bytes]()
    backend = opener(medium, SWEPT, capacity_bytes=64 * KIB, removed=removed.extend)
    items = [one(k) for k in range(200)]
    for item in items:
        assert put(backend, [item]) == [PutStatus.STORED]
        assert stored_bytes(medium) <= 64 * KIB
    here = present(backend, items)
    assert 40 <= sum(here) <= 64
    assert here == sorted(here), "not the oldest were evicted"
    assert sorted(removed) == sorted(item.name for item, there in zip(items, here, strict=True) if not there)
    usage = backend.usage()
    assert usage.evicted == len(removed)
    assert usage.records == sum(here)
    assert usage.payload_bytes == stored_bytes(medium)
    assert usage.capacity_bytes == 64 * KIB


def test_a_used_object_survives_older_than_others(opener: Opener) -> None:
    medium = MemMedium()
    backend = opener(medium, SWEPT, capacity_bytes=64 * KIB)
    items = [one(k) for k in range(120)]
    for k, item in enumerate(items):
        put(backend, [item])
        backend.touch_many([items[0].name])
        if k % 10 == 0:
            backend.maintain()
    assert present(backend, items[:2]) == [True, False]


def test_the_tail_of_a_prompt_goes_before_its_head(opener: Opener) -> None:
    class Aged(MemMedium):
        def backdate(self, key: str, by_s: float, call: Call) -> None:
            self.objects[key].modified -= by_s

    medium = Aged()
    names = chain("prompt", 64)
    backend = opener(medium, SWEPT, capacity_bytes=64 * 320 + 2000)
    for k in range(0, 64, 16):
        put(backend, items_of(names, k, k + 16))
    put(backend, items_of(chain("second", 20), 0, 20))
    found = backend.exists_many(names, call_for(names))
    kept = found.count(Presence.PRESENT)
    assert 8 <= kept < 64
    second = chain("second", 20)
    assert set(backend.exists_many(second, call_for(second))) == {Presence.PRESENT}
    assert found == [Presence.PRESENT] * kept + [Presence.ABSENT] * (64 - kept)


def test_what_cannot_fit_is_too_large(opener: Opener) -> None:
    backend = opener(MemMedium(), SWEPT, capacity_bytes=4 * KIB)
    assert put(backend, [one(1, 5 * KIB), one(2)]) == [PutStatus.TOO_LARGE, PutStatus.STORED]


def test_a_pack_larger_than_a_small_store_is_cut_smaller(opener: Opener, medium: MemMedium) -> None:
    names = chain("small", 16)
    backend = opener(medium, SWEPT, capacity_bytes=3 * KIB)
    assert set(put(backend, items_of(names, 0, 16))) == {PutStatus.STORED}
    assert stored_bytes(medium) <= 3 * KIB


def test_two_processes_that_sweep_at_once_stay_near_the_capacity(opener: Opener) -> None:
    medium = MemMedium()
    backends = [opener(medium, {**SWEPT, "survey_interval_s": 60.0}, capacity_bytes=128 * KIB) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda b=b, n=n: [put(b, [one(n * 1000 + k)]) and b.maintain() for k in range(150)])
        for n, b in enumerate(backends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    usages = [backend.usage() for backend in backends]
    assert stored_bytes(medium) <= 128 * KIB * 1.02
    assert {usage.payload_bytes for usage in usages} == {stored_bytes(medium)}
    assert sum(usage.evicted for usage in usages) >= 150
    assert sum(present(backends[0], [one(n * 1000 + k) for n in range(2) for k in range(150)])) == usages[0].records


def test_a_full_medium_is_healed_by_evicting(opener: Opener) -> None:
    medium = MemMedium()

    def full(operation: str, key: str) -> BackendFullError | None:
        return BackendFullError("no room") if operation == "write" and stored_bytes(medium) > 20 * KIB else None

    medium.fault = full
    backend = opener(medium, SWEPT)
    statuses = [put(backend, [one(k)])[0] for k in range(60)]
    assert statuses == [PutStatus.STORED] * 60
    medium.fault = lambda op, _: BackendFullError("quota") if op == "write" else None
    assert put(backend, [one(100)]) == [PutStatus.FULL]
    medium.fault = None
    assert put(backend, [one(100)]) == [PutStatus.STORED]


@pytest.mark.parametrize("evicts", [True, False])
def test_only_backends_that_sweep_do(opener: Opener, medium: MemMedium, evicts: bool) -> None:
    backend = opener(medium, {**SWEPT, "evicts": evicts}, capacity_bytes=16 * KIB)
    for k in range(40):
        assert put(backend, [one(k)]) == [PutStatus.STORED]
    assert (stored_bytes(medium) <= 16 * KIB) is evicts


def test_an_old_object_is_refreshed_once_when_it_is_used(opener: Opener) -> None:
    medium = MemMedium(clock=lambda: 1000.0)
    names = chain("refresh", 32)
    put(opener(medium), items_of(names, 0, 32))
    backend = opener(medium, {"refresh_after_s": 3600.0})
    read(backend, names, call_for(names))
    medium.clock = lambda: 2e9
    for _ in range(5):
        backend.touch_many(names[::-1])
        backend.maintain()
    assert medium.count["refresh"] == 2
    assert {stored.modified for stored in medium.records().values()} == {2e9}
    medium.count.clear()
    fresh = opener(MemMedium(), {"refresh_after_s": 3600.0})
    put(fresh, items_of(names, 0, 32))
    fresh.touch_many(names)
    fresh.maintain()
    assert not fresh.medium.count["refresh"]
    assert not fresh.medium.count["head"]


def test_a_put_of_an_old_object_refreshes_it(opener: Opener) -> None:
    medium = MemMedium(clock=lambda: 1000.0)
    names = chain("again", 16)
    put(opener(medium), items_of(names, 0, 16))
    medium.clock = lambda: 2e9
    backend = opener(medium, {"refresh_after_s": 3600.0})
    assert set(put(backend, items_of(names, 0, 16))) == {PutStatus.EXISTS}
    backend.maintain()
    assert [stored.modified for stored in medium.records().values()] == [2e9]


def test_what_another_process_removed_is_not_offered_after_a_listing(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium, {**SWEPT, "positive_ttl_s": 600.0}, capacity_bytes=1 << 20)
    items = [one(k) for k in range(4)]
    put(backend, items)
    opener(medium).delete_many([items[1].name], Call.within(9.0))
    assert present(backend, items) == [True] * 4
    assert backend.usage().records == 3
    assert present(backend, items) == [True, False, True, True]


def test_room_that_another_writer_takes_is_made_again(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener(MemMedium(), SWEPT, capacity_bytes=64 * KIB)
    assert backend._session is not None
    space = backend._session.store.space
    put(backend, [one(k) for k in range(60)])
    numbers = iter(range(100, 1000))
    make_room = space.evictor.make_room
    thefts = 0

    def overtaken(needed_bytes: int, ahead_bytes: int) -> bool:
        nonlocal thefts
        made = make_room(needed_bytes, ahead_bytes)
        if thefts < 8:
            thefts += 1
            monkeypatch.setattr(space.evictor, "make_room", make_room)
            while space.excess(needed_bytes) <= 0:
                put(backend, [one(next(numbers))])
            monkeypatch.setattr(space.evictor, "make_room", overtaken)
        return made

    monkeypatch.setattr(space.evictor, "make_room", overtaken)
    assert put(backend, [one(61, 4 * KIB)]) == [PutStatus.STORED]
    assert thefts == 8


def test_room_that_a_listing_found_and_others_took_is_made_by_evicting(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opener(MemMedium(), SWEPT, capacity_bytes=64 * KIB)
    assert backend._session is not None
    space = backend._session.store.space
    put(backend, [one(k) for k in range(60)])
    excess, found, thefts = space.excess, [], []

    def look_again() -> None:  # others have evicted
        space._tally.nbytes -= 32 * KIB
        found.append(True)

    def taken_at_once(wanted_bytes: int = 0) -> int:
        left = excess(wanted_bytes)
        if found and left <= 0:  # and write again, as soon as somebody has looked
            thefts.append(found.pop())
            space._tally.nbytes += 32 * KIB
            monkeypatch.setattr(space, "look_again", lambda: None)
        return left

    monkeypatch.setattr(space, "look_again", look_again)
    monkeypatch.setattr(space, "excess", taken_at_once)
    assert put(backend, [one(61, 4 * KIB)]) == [PutStatus.STORED]
    assert thefts
