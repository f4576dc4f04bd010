"""Laws about many threads at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Final

from kvstore.backend import Backend, Capability
from kvstore.testing.samples import STORED, Received, bytes_of, call, item_of, name_of, names_of, put, read
from kvstore.testing.store import Store
from kvstore.types import Presence, PutStatus

_THREADS: Final = 8
_IDS: Final = 24


def together(work: Callable[[int], None], threads: int = _THREADS) -> None:
    """Run ``work(number)`` in threads that start at once; raises what the first of them raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(threads)

    def run(number: int) -> None:
        try:
            start.wait(30)
            work(number)
        except BaseException as e:  # noqa: BLE001 - raised again by the test's own thread
            raised.append(e)

    running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(120)
    assert not any(thread.is_alive() for thread in running), "a thread hangs in the backend"
    if raised:
        raise raised[0]


def nbytes_of(i: int) -> int:
    """Records of several lengths, so that mixtures show."""
    return 500 + 3000 * (i % 5)


class ThreadLaws:
    """All methods may run concurrently."""

    usage_is_exact: ClassVar[bool]

    hammer_s: ClassVar[float] = 0.7
    """How long threads hammer on one backend."""

    def test_threads_that_do_everything_see_whole_records(self, backend: Backend) -> None:
        until = time.monotonic() + self.hammer_s
        names = names_of(range(_IDS))

        def work(number: int) -> None:
            rng = random.Random(number)  # noqa: S311 - a reproducible choice
            while time.monotonic() < until:
                ids = rng.sample(range(_IDS), rng.randint(1, 6))
                some = [names[i] for i in ids]
                match rng.randrange(6):
                    case 0 | 1:
                        assert set(put(backend, *[item_of(i, nbytes_of(i)) for i in ids])) <= STORED
                    case 2:
                        assert backend.delete_many(some, call()) <= len(some)
                    case 3:
                        received = Received()
                        statuses = backend.get_ranges(some, [(100, 300)] * len(some), received, call())
                        for i, data in zip(ids, received.of(statuses), strict=True):
                            assert data in (None, bytes_of(i, nbytes_of(i))[100:300])
                    case 4:
                        assert len(backend.exists_many(some, call())) == len(some)
                        backend.touch_many(some)
                        backend.maintain()
                    case _:
                        for i, data in zip(ids, read(backend, some), strict=True):
                            assert data in (None, bytes_of(i, nbytes_of(i)))

        together(work)
        there = [presence is Presence.PRESENT for presence in backend.exists_many(names, call())]
        assert read(backend, names) == [bytes_of(i, nbytes_of(i)) if here else None for i, here in enumerate(there)]
        assert not self.usage_is_exact or backend.usage().records == sum(there)

    def test_one_record_put_by_all_threads_is_one_record(self, backend: Backend, store: Store) -> None:
        answers: list[PutStatus] = []

        def work(_: int) -> None:
            for i in range(6):
                answers.extend(put(backend, item_of(i)))

        together(work)
        assert set(answers) <= STORED
        assert answers.count(PutStatus.STORED) >= 6
        assert read(backend, names_of(range(6))) == [bytes_of(i, 5000) for i in range(6)]
        if store.has(Capability.SCAN):
            assert sorted(info.name for info in backend.scan()) == sorted(names_of(range(6)))

    def test_records_of_several_threads_do_not_disturb_each_other(self, backend: Backend) -> None:
        def work(number: int) -> None:
            ids = [f"{number}/{i}" for i in range(8)]
            assert set(put(backend, *[item_of(i, 9000) for i in ids])) == {PutStatus.STORED}
            for _ in range(4):
                assert read(backend, names_of(ids)) == [bytes_of(i, 9000) for i in ids]
            assert backend.delete_many(names_of(ids[::2]), call()) == 4
            kept = [None if n % 2 == 0 else bytes_of(i, 9000) for n, i in enumerate(ids)]
            assert read(backend, names_of(ids)) == kept

        together(work)

    def test_threads_get_one_epoch(self, backend: Backend) -> None:
        epochs: set[bytes] = set()
        together(lambda _: epochs.add(backend.epoch(b"same namespace!!")))
        assert epochs == {backend.epoch(b"same namespace!!")}

    def test_reads_go_on_while_another_thread_lists(self, backend: Backend, store: Store) -> None:
        if not store.has(Capability.SCAN):
            return
        put(backend, *[item_of(i) for i in range(20)])
        listed = backend.scan()
        first = next(listed)
        assert read(backend, [name_of(3)]) == [bytes_of(3, 5000)]
        assert put(backend, item_of("while listing")) == [PutStatus.STORED]
        rest = {info.name for info in listed}
        assert set(names_of(range(20))) <= {first.name, *rest}
