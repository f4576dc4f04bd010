"""Room that several threads and processes take at once: evicted once, counted once, bounded at every moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from kvstore.backend import PutItem
from kvstore.objects.medium import ObjectInfo
from kvstore.objects.tally import Tally, Write
from kvstore.types import Call, PutStatus
from tests.unit.objects.conftest import Opener
from tests.unit.objects.mem import MemBackend, MemMedium, chain, content, put

KIB = 1 << 10
SWEPT: dict[str, object] = {"evicts": True, "positive_ttl_s": 0.0, "negative_ttl_s": 0.0, "survey_interval_s": 60.0}


def one(k: object, nbytes: int = KIB) -> PutItem:
    name = chain(f"one{k}", 1)[0]
    return PutItem(name, [content(name, nbytes)])


def stored_bytes(medium: MemMedium) -> int:
    return sum(len(stored.data) for stored in list(medium.objects.values()))


def together(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_wait_for_room_find_it_made(opener: Opener) -> None:
    medium = MemMedium()
    backend = opener(medium, SWEPT, capacity_bytes=64 * KIB)
    other = opener(medium)
    for k in range(96):  # half as much again as there is room for, by a process that does not evict
        put(other, [one(k)])
    backend._session.store.space.look()  # type: ignore[union-attr]
    medium.latency_s = 0.002
    together(*[backend.maintain] * 4)
    assert 58 * KIB <= stored_bytes(medium) <= 64 * KIB


@dataclass
class Interrupted(MemMedium):
    """Does something in the middle of a listing."""

    meanwhile: Callable[[], object] | None = None
    listed: list[str] = field(default_factory=list)

    def entries(self, prefix: str, call: Call) -> Iterator[ObjectInfo]:
        found = list(super().entries(prefix, call))
        for k, info in enumerate(found):
            if k == len(found) // 2 and self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()
            if info.key in self.objects:
                self.listed.append(info.key)
                yield info
        for key in self.objects:  # what was written meanwhile may be listed or not
            if key not in {info.key for info in found} and len(key) % 2 == len(self.objects[key].data) % 2:
                yield ObjectInfo(key, len(self.objects[key].data), self.objects[key].modified, 1)


@pytest.mark.parametrize("more_bytes", [KIB, KIB + 1])
def test_a_listing_counts_what_happens_meanwhile_once(opener: Opener, more_bytes: int) -> None:
    medium = Interrupted()
    backend = opener(medium, SWEPT, capacity_bytes=1 << 20)
    for k in range(20):
        put(backend, [one(k)])

    def meanwhile() -> None:
        for k in range(100, 104):
            assert put(backend, [one(k, more_bytes)]) == [PutStatus.STORED]
        assert backend.delete_many([one(k).name for k in (0, 1, 18, 19)], Call.within(9.0)) == 4

    space = backend._session.store.space  # type: ignore[union-attr]
    medium.meanwhile = meanwhile
    space.look()
    assert space._tally.nbytes == stored_bytes(medium)
    assert space._tally.records == len(medium.objects) == 20


def test_a_write_that_is_listed_before_it_ended_is_counted_once() -> None:
    tally = Tally()
    write = Write("key", 100, 4, 100)
    assert tally.begin(write, 100)
    assert not tally.begin(Write("other", 1, 1, 1), 100)
    tally.begin_listing()
    tally.saw("key", 100)
    assert tally.end_listing(4, 100)  # nobody else wrote
    assert (tally.records, tally.nbytes, tally.reserved) == (4, 100, 0)
    tally.end(write, written=True)
    assert (tally.records, tally.nbytes, tally.reserved) == (4, 100, 0)


def test_a_failed_write_gives_its_room_back() -> None:
    tally = Tally()
    write = Write("key", 100, 4, 100)
    assert tally.begin(write, 100)
    tally.begin_listing()
    tally.end(write, written=False)
    tally.end_listing(0, 0)
    assert (tally.records, tally.nbytes, tally.reserved, tally.unseen) == (0, 0, 0, 0)


def test_a_listing_that_failed_leaves_the_counts() -> None:
    tally = Tally()
    for key in ("a", "b"):
        write = Write(key, 10, 1, 10)
        tally.begin(write, None)
        tally.end(write, written=True)
    tally.begin_listing()
    tally.saw("a", 10)
    tally.give_up_listing()
    tally.removed("a", 1, 10)
    assert (tally.records, tally.nbytes) == (1, 10)


@dataclass
class Watched(MemMedium):
    """Knows the most that it ever held."""

    most_bytes: int = 0

    def write(self, key: str, buffers: list[bytes], call: Call, *, once: bool, blocks: int) -> bool:  # type: ignore[override]
        written = super().write(key, buffers, call, once=once, blocks=blocks)
        self.most_bytes = max(self.most_bytes, stored_bytes(self))
        return written


def test_writers_together_stay_within_their_shares_and_keep_the_medium_full(opener: Opener) -> None:
    medium, capacity, writers = Watched(), 256 * KIB, 4
    backends = [opener(medium, SWEPT, capacity_bytes=capacity) for _ in range(writers)]

    def write(n: int, backend: MemBackend) -> None:
        for k in range(200):
            assert put(backend, [one(n * 1000 + k)]) == [PutStatus.STORED]

    together(*[lambda n=n, backend=backend: write(n, backend) for n, backend in enumerate(backends)])
    assert medium.most_bytes <= capacity * (1 + (writers - 1) / 50)
    assert stored_bytes(medium) >= 0.9 * capacity


def test_who_is_alone_for_some_time_lists_ever_less(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.objects.space._ALONE_S", 1e-9)
    medium = MemMedium()
    backend = opener(medium, SWEPT, capacity_bytes=1000 * KIB)
    backend.usage()
    medium.count.clear()
    for k in range(1900):
        assert put(backend, [one(k)]) == [PutStatus.STORED]
    assert medium.count["entries"] <= 25  # of 95 shares
    monkeypatch.setattr("kvstore.objects.space._ALONE_S", 60.0)
    other = opener(medium)
    for k in range(2000, 2100):
        put(other, [one(k)])
    backend.usage()
    medium.count.clear()
    for k in range(3000, 3100):
        put(backend, [one(k)])
    assert medium.count["entries"] >= 3


def test_what_others_evicted_counts_as_room(opener: Opener) -> None:
    medium = MemMedium()
    settings = {**SWEPT, "survey_interval_s": 0.0}
    a, b = (opener(medium, settings, capacity_bytes=64 * KIB) for _ in range(2))
    for k in range(60):
        put(a, [one(k)])
    b.usage()
    for key in [key for key, _ in sorted(medium.objects.items(), key=lambda kv: kv[1].modified)][:30]:
        del medium.objects[key]  # another process evicted the oldest half
    for k in range(100, 110):
        assert put(a, [one(k)]) == [PutStatus.STORED]
    assert stored_bytes(medium) >= 38 * KIB
    assert a.usage().payload_bytes == stored_bytes(medium)
