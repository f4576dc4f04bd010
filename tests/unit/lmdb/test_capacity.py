"""Live records stay within the capacity, the file within its bound, and the right records go."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kvstore_lmdb.backend import LmdbBackend
from kvstore_lmdb.bound import oldest_reader
from kvstore_lmdb.space import Space

from kvstore.backend import PutItem
from kvstore.errors import ConfigError
from kvstore.types import Call, Presence, PutStatus
from tests.unit.lmdb.stores import MIB, Opener, bytes_of, call, item_of, name_of, put, read

CAPACITY = 16 * MIB
LONGEST = CAPACITY * 5 // 4 + MIB


def present(backend: LmdbBackend, ids: Sequence[int]) -> list[int]:
    answers = backend.exists_many([name_of(i) for i in ids], call())
    return [i for i, a in zip(ids, answers, strict=True) if a is Presence.PRESENT]


def test_churn_of_mixed_sizes_refuses_nothing_and_keeps_the_newest(opener: Opener, tmp_path: Path) -> None:
    removed: list[bytes] = []
    backend = opener(capacity_bytes=CAPACITY, removed=removed.extend)
    sizes = [60_000 + i * 104_729 % 200_000 for i in range(600)]
    statuses: list[PutStatus] = []
    stored: list[int] = []
    longest = 0

    def work(t: int) -> None:
        nonlocal longest
        for i in range(t, 600, 4):
            statuses.extend(put(backend, item_of(i, sizes[i])))
            stored.append(i)
            longest = max(longest, (tmp_path / "store" / "data.mdb").stat().st_size)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [PutStatus.STORED] * 600
    assert longest <= LONGEST
    usage = backend.usage()
    assert 0.8 * CAPACITY < usage.payload_bytes <= CAPACITY
    newest = stored[-40:]  # about half of the capacity
    assert read(backend, [name_of(i) for i in newest]) == [bytes_of(i, sizes[i]) for i in newest]
    assert usage.evicted == len(removed) == len(set(removed))
    gone = set(range(600)) - set(present(backend, list(range(600))))
    assert {name_of(i) for i in gone} == set(removed)


def test_the_file_keeps_its_bound_while_a_reader_holds_old_pages(opener: Opener, tmp_path: Path) -> None:
    backend = opener(capacity_bytes=CAPACITY)
    put(backend, *[item_of(i, 100_000) for i in range(140)])
    inside, go = threading.Event(), threading.Event()

    def hold(_i: int, _view: memoryview) -> None:
        inside.set()
        go.wait(30)

    reader = threading.Thread(target=lambda: backend.get_many([name_of(139)], hold, call()))
    reader.start()
    inside.wait(30)
    held = [put(backend, item_of(i, 100_000))[0] for i in range(1000, 1200)]
    assert (tmp_path / "store" / "data.mdb").stat().st_size <= LONGEST
    assert held[0] is PutStatus.STORED
    assert held[-1] is PutStatus.FULL
    go.set()
    reader.join()
    after = [put(backend, item_of(i, 100_000))[0] for i in range(2000, 2100)]
    assert after.count(PutStatus.STORED) >= 98
    assert (tmp_path / "store" / "data.mdb").stat().st_size <= LONGEST


def test_a_file_near_its_bound_is_used_again_instead_of_grown(opener: Opener, tmp_path: Path) -> None:
    backend = opener(capacity_bytes=4 * MIB)
    longest = 4 * MIB * 5 // 4 + MIB
    statuses = [put(backend, item_of(i, 900_000 + i % 7 * 4096))[0] for i in range(60)]
    assert statuses == [PutStatus.STORED] * 60
    assert (tmp_path / "store" / "data.mdb").stat().st_size <= longest


def test_oldest_use_goes_first_and_a_touch_counts_as_use(opener: Opener) -> None:
    backend = opener(capacity_bytes=2 * MIB)
    put(backend, *[item_of(i, 100_000) for i in range(18)])
    backend.touch_many([name_of(1), name_of(0)])
    backend.maintain()
    put(backend, item_of(2, 100_000))  # stored already: refreshed
    put(backend, *[item_of(i, 100_000) for i in range(100, 108)])
    left = present(backend, list(range(18)))
    assert left[:3] == [0, 1, 2]
    assert 3 < len(left) < 18
    assert left[3:] == list(range(18))[-len(left[3:]) :]


def test_within_one_request_the_tail_goes_before_the_head(opener: Opener) -> None:
    backend = opener(capacity_bytes=2 * MIB)
    put(backend, *[item_of(i, 100_000) for i in reversed(range(18))])  # tail first, as the core does
    put(backend, *[item_of(i, 100_000) for i in range(100, 110)])
    left = present(backend, list(range(18)))
    assert left == list(range(len(left)))
    assert 0 < len(left) < 18


def test_a_queued_touch_is_written_with_the_next_put(opener: Opener) -> None:
    backend = opener(capacity_bytes=2 * MIB)
    put(backend, *[item_of(i, 100_000) for i in range(18)])
    backend.touch_many([name_of(0)])
    put(backend, item_of(100, 1000))
    put(backend, *[item_of(i, 100_000) for i in range(101, 110)])
    assert present(backend, [0]) == [0]


def test_what_is_put_is_younger_than_what_was_used_before(opener: Opener) -> None:
    backend = opener(capacity_bytes=MIB)
    put(backend, *[item_of(i, 100_000) for i in range(9)])
    backend.touch_many([name_of(i) for i in range(9)])  # everything that is stored was used a moment ago
    for i in (100, 101, 102):  # a prompt's blocks, one batch each
        put(backend, item_of(i, 100_000))
    assert present(backend, [100, 101, 102]) == [100, 101, 102]


def test_what_is_put_is_younger_than_any_number_of_uses_before_it(opener: Opener) -> None:
    backend = opener(capacity_bytes=MIB)
    put(backend, *[item_of(i, 3_000) for i in range(250)])
    backend.touch_many([name_of(i) for i in range(250)])  # more than one put takes along
    assert put(backend, *[item_of(i, 3_000) for i in range(1000, 1200)]) == [PutStatus.STORED] * 200
    assert present(backend, range(1000, 1200)) == list(range(1000, 1200))


def test_a_use_that_waited_makes_its_record_no_younger_than_what_came_after_it(opener: Opener) -> None:
    backend = opener(capacity_bytes=MIB)
    put(backend, *[item_of(i, 100_000) for i in range(5)])
    backend.touch_many([name_of(0)])
    put(backend, *[item_of(i, 100_000) for i in range(5, 9)])
    backend.maintain()
    put(backend, *[item_of(i, 100_000) for i in range(9, 13)])  # the oldest four go, the used one is the fifth
    assert present(backend, range(5)) == [0]


def test_what_was_used_a_moment_ago_is_not_evicted(opener: Opener) -> None:
    backend = opener(capacity_bytes=MIB)
    put(backend, *[item_of(i, 3_000) for i in range(250)])
    oldest = present(backend, range(250))[:20]
    evicted = backend.usage().evicted
    backend.touch_many([name_of(i) for i in oldest])
    put(backend, *[item_of(i, 3_000) for i in range(1000, 1030)])
    assert backend.usage().evicted > evicted
    assert present(backend, oldest) == oldest


def test_uses_stay_queued_while_the_file_has_no_page_to_spare(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener(capacity_bytes=MIB)
    put(backend, *[item_of(i, 100_000) for i in range(9)])
    assert backend._session is not None
    writer = backend._session.writer
    assert writer is not None
    backend.touch_many([name_of(8)])
    with monkeypatch.context() as patch:
        patch.setattr(writer._bound, "spent", lambda: True)
        backend.maintain()
        put(backend, item_of(9, 100_000))
    assert list(writer._touched) == [name_of(8)]
    backend.maintain()
    assert not writer._touched


def test_a_use_counts_when_the_clock_was_set_back(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener(capacity_bytes=MIB)
    put(backend, *[item_of(i, 100_000) for i in range(9)])
    monkeypatch.setattr("time.time_ns", lambda: 1_000_000_000)
    backend.touch_many([name_of(0)])
    backend.maintain()
    for i in range(9, 12):
        put(backend, item_of(i, 100_000))
    gone = set(range(9)) - set(present(backend, range(9)))
    assert gone
    assert 0 not in gone


def test_queued_touches_are_bounded(backend: LmdbBackend) -> None:
    backend.touch_many([i.to_bytes(4, "big") for i in range(70_000)])
    assert backend._session is not None
    assert backend._session.writer is not None
    assert len(backend._session.writer._touched) == 1 << 16


def test_a_put_of_stored_names_evicts_nothing(opener: Opener) -> None:
    backend = opener(capacity_bytes=2 * MIB)
    items = [item_of(i, 100_000) for i in range(19)]
    put(backend, *items)
    assert put(backend, *items) == [PutStatus.EXISTS] * 19
    assert backend.usage().evicted == 0


def test_a_record_larger_than_the_capacity_is_refused_without_evicting(opener: Opener) -> None:
    backend = opener(capacity_bytes=2 * MIB)
    put(backend, item_of(0, 500_000))
    statuses = put(backend, item_of(1, 2 * MIB), item_of(2, 1000))
    assert statuses == [PutStatus.TOO_LARGE, PutStatus.STORED]
    assert present(backend, [0, 1, 2]) == [0, 2]


def test_another_capacity_at_open_wins_with_one_warning(
    opener: Opener, warnings: Callable[[], list[str]], tmp_path: Path
) -> None:
    backend = opener(capacity_bytes=8 * MIB)
    put(backend, *[item_of(i, 100_000) for i in range(60)])
    backend.close()
    again = opener(capacity_bytes=2 * MIB)
    assert [w for w in warnings() if "capacity changed from 8388608 to 2097152" in w] == warnings()
    assert again.usage().capacity_bytes == 2 * MIB
    while again.usage().payload_bytes > 2 * MIB:
        before = again.usage().records
        again.maintain()
        assert again.usage().records < before
    assert put(again, *[item_of(i, 100_000) for i in range(100, 140)]) == [PutStatus.STORED] * 40
    size = (tmp_path / "store" / "data.mdb").stat().st_size
    assert again.usage().payload_bytes <= 2 * MIB
    assert size <= 8 * MIB * 5 // 4  # the file does not shrink, and does not grow
    again.close()
    assert opener(capacity_bytes=None).usage().capacity_bytes == 2 * MIB


@pytest.mark.parametrize("capacity_bytes", [0, -1, 1000])
def test_a_capacity_too_small_for_the_trees_is_a_config_error(opener: Opener, capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        opener(capacity_bytes=capacity_bytes)


def test_usage_equals_what_the_records_need(backend: LmdbBackend) -> None:
    sizes = [5000 + i * 104_729 % 295_000 for i in range(80)]
    put(backend, *[item_of(i, n) for i, n in enumerate(sizes)])
    backend.delete_many([name_of(i) for i in range(0, 80, 3)], call())
    pages = sum((16 + n + 4095) // 4096 for i, n in enumerate(sizes) if i % 3)
    usage = backend.usage()
    assert usage.records == 80 - 27
    assert 0 <= usage.payload_bytes - pages * 4096 <= 20 * 4096  # leaves of three trees


def test_a_dropped_prefix_is_reclaimed_bit_by_bit_and_across_a_restart(opener: Opener) -> None:
    backend = opener()
    put(backend, *[item_of(i, 1000) for i in range(50)])
    mine = [(b"P" * 16) + os.urandom(33) for _ in range(300)]
    for name in mine:
        put(backend, PutItem(name, [b"head", b"x" * 30_000]))
    backend.drop(b"P" * 16)
    assert backend.usage().records == 350
    backend.close()
    again = opener()
    for _ in range(200):
        again.maintain()
        if again.usage().records == 50:
            break
    assert again.usage().records == 50
    assert present(again, list(range(50))) == list(range(50))
    assert put(again, PutItem(mine[0], [b"new"])) == [PutStatus.STORED]
    again.maintain()
    assert read(again, [mine[0]]) == [b"new"]  # a drop does not outlive its records


def test_a_full_call_ends_by_its_deadline(opener: Opener) -> None:
    backend = opener(capacity_bytes=2 * MIB)
    statuses = backend.put_many([item_of(i, 100_000) for i in range(200)], Call.within(0.05))
    assert set(statuses) <= {PutStatus.STORED, PutStatus.TIMEOUT}


def test_pages_round_up_with_the_page_header(backend: LmdbBackend) -> None:
    assert backend._session is not None
    assert backend._session.writer is not None
    space: Space = backend._session.writer.space
    assert [space.pages(n) for n in (0, 4080, 4081, 2 * MIB - 16, 2 * MIB)] == [1, 1, 2, 512, 513]


def test_oldest_reader_reads_liblmdbs_table() -> None:
    table = "    pid     thread     txnid\n      9945 7f895b21bb80 12\n      9946 7f895b21bb81 -\n      77 7f89 7\n"
    assert oldest_reader(table) == 7
    assert oldest_reader("(no active readers)\n") is None
