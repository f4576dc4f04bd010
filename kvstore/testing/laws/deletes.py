"""Laws about what leaves on purpose: delete, discard, epochs, drop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from kvstore.backend import Backend, Capability
from kvstore.testing.samples import (
    CHECKSUM_AT,
    bytes_of,
    call,
    item_of,
    name_of,
    named,
    names_of,
    put,
    put_all,
    read,
)
from kvstore.testing.store import Store
from kvstore.types import Presence, PutStatus


def eventually(law: Callable[[], bool], seconds: float) -> bool:
    """Whether something becomes true within a time."""
    deadline = time.monotonic() + seconds
    while not law():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class DeleteLaws:
    """What was deleted is gone, and nothing else is."""

    epoch_age_s: ClassVar[float] = 5.0
    """How long an open backend may go on with an epoch that another one has ended."""

    reclaim_s: ClassVar[float] = 20.0
    """How long a ``drop`` may take while ``maintain`` is called again and again."""

    def test_a_deleted_record_is_gone(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in range(4)])
        assert backend.delete_many(names_of([1, 3]), call()) == 2
        kept = [bytes_of(i, 5000) if i % 2 == 0 else None for i in range(4)]
        assert read(backend, names_of(range(4))) == kept
        assert backend.exists_many(names_of(range(4)), call()) == [
            Presence.ABSENT if data is None else Presence.PRESENT for data in kept
        ]

    def test_absent_and_repeated_names_do_not_count_as_deleted(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in range(2)])
        assert backend.delete_many(names_of(["absent", 0, "absent", 0, 1]), call()) == 2
        assert backend.delete_many(names_of([0, 1]), call()) == 0

    def test_a_deleted_name_can_be_put_again(self, backend: Backend) -> None:
        for version in range(3):
            data = bytes_of(version, 3000)
            assert put(backend, named(name_of("again"), data)) == [PutStatus.STORED]
            assert read(backend, [name_of("again")]) == [data]
            assert backend.delete_many([name_of("again")], call()) == 1

    def test_another_reader_sees_a_delete(self, backend: Backend, store: Store) -> None:
        if not store.has(Capability.SHARED):
            return self._lives_alone(backend, store)
        other = store.open()
        put(backend, item_of("shared"))
        assert read(other, [name_of("shared")]) == [bytes_of("shared", 5000)]
        assert other.delete_many([name_of("shared")], call()) == 1
        assert read(backend, [name_of("shared")]) == [None]
        assert backend.exists_many([name_of("shared")], call()) == [Presence.ABSENT]
        return None

    @staticmethod
    def _lives_alone(backend: Backend, store: Store) -> None:
        """Without SHARED a second opener is refused or sees a store of its own."""
        put(backend, item_of("mine"))
        try:
            other = store.open()
        except Exception:  # noqa: BLE001 - any refusal will do
            return
        assert read(other, [name_of("mine")]) == [None]

    def test_discard_drops_the_record_with_that_checksum(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in range(2)])
        checksum = int.from_bytes(bytes_of(0, 5000)[CHECKSUM_AT : CHECKSUM_AT + 8], "little")
        backend.discard(name_of(0), checksum)
        assert read(backend, names_of(range(2))) == [None, bytes_of(1, 5000)]

    def test_discard_leaves_a_record_that_was_repaired(self, backend: Backend) -> None:
        put(backend, item_of("good"))
        checksum = int.from_bytes(bytes_of("good", 5000)[CHECKSUM_AT : CHECKSUM_AT + 8], "little")
        for other in (checksum ^ 1, checksum ^ (1 << 63), int.from_bytes(checksum.to_bytes(8, "little"), "big")):
            backend.discard(name_of("good"), other)
        assert read(backend, [name_of("good")]) == [bytes_of("good", 5000)]

    def test_discard_drops_a_record_too_short_for_a_header(self, backend: Backend) -> None:
        lengths = (0, 1, 184, 191)
        put_all(backend, [named(name_of(nbytes), bytes_of("short", nbytes)) for nbytes in lengths])
        for name in names_of(lengths):
            backend.discard(name, 1)
        assert read(backend, names_of(lengths)) == [None] * len(lengths)

    def test_discard_of_an_absent_record_is_no_error(self, backend: Backend) -> None:
        backend.discard(name_of("absent"), 0)
        put(backend, item_of("there"))
        backend.discard(name_of("absent"), 0)
        assert read(backend, [name_of("there")]) == [bytes_of("there", 5000)]

    def test_an_epoch_has_8_bytes_and_stays(self, backend: Backend) -> None:
        first = backend.epoch(b"a" * 16)
        assert type(first) is bytes
        assert len(first) == 8
        assert {backend.epoch(b"a" * 16) for _ in range(5)} == {first}

    def test_a_bump_makes_a_new_epoch_for_one_namespace(self, backend: Backend) -> None:
        a, b = backend.epoch(b"a" * 16), backend.epoch(b"b" * 16)
        assert a != b
        bumped = backend.epoch(b"a" * 16, bump=True)
        assert len(bumped) == 8
        assert bumped != a
        assert backend.epoch(b"a" * 16) == bumped
        assert backend.epoch(b"b" * 16) == b
        assert len({backend.epoch(b"a" * 16, bump=True) for _ in range(4)} | {a, bumped}) == 6

    def test_a_bump_deletes_no_record(self, backend: Backend) -> None:
        put(backend, item_of("kept"))
        backend.epoch(bytes(range(16)), bump=True)
        assert read(backend, [name_of("kept")]) == [bytes_of("kept", 5000)]

    def test_another_opener_follows_a_bump(self, backend: Backend, store: Store) -> None:
        if not store.has(Capability.SHARED):
            return self._lives_alone(backend, store)
        other = store.open()
        assert other.epoch(b"a" * 16) == backend.epoch(b"a" * 16)
        for bumping, following in ((backend, other), (other, backend)):
            epoch = bumping.epoch(b"a" * 16, bump=True)
            assert eventually(lambda f=following, e=epoch: f.epoch(b"a" * 16) == e, self.epoch_age_s)  # type: ignore[misc]
        return None

    def test_drop_takes_what_starts_with_the_prefix_and_nothing_else(self, backend: Backend) -> None:
        old = [named(b"old-prefix-0123" + bytes([i]) * 20, bytes_of(i, 600)) for i in range(12)]
        new = [named(b"new-prefix-0123" + bytes([i]) * 20, bytes_of(i, 600)) for i in range(12)]
        put_all(backend, [*old, *new])
        backend.drop(b"old-prefix-0123")
        names = [item.name for item in old]

        def reclaimed() -> bool:
            backend.maintain()
            return set(backend.exists_many(names, call())) == {Presence.ABSENT}

        if type(backend).drop is not Backend.drop:
            assert eventually(reclaimed, self.reclaim_s)
        else:
            backend.maintain()
            assert read(backend, names) == [bytes_of(i, 600) for i in range(12)]
        assert read(backend, [item.name for item in new]) == [bytes_of(i, 600) for i in range(12)]
