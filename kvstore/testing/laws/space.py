"""Laws about room: listing, counting, evicting, upkeep."""

from __future__ import annotations

import time
from typing import ClassVar, Final

import pytest

from kvstore.backend import Backend, Capability, PutItem
from kvstore.errors import NotSupportedError
from kvstore.testing.samples import STORED, bytes_of, call, item_of, name_of, named, names_of, put, put_all, read
from kvstore.testing.store import Store
from kvstore.types import Presence, PutStatus

_LISTED: Final = 120
_BATCH: Final = 8


def stored_of(backend: Backend, names: list[bytes]) -> list[bool]:
    """Which names the backend says it holds."""
    return [presence is Presence.PRESENT for presence in backend.exists_many(names, call())]


class SpaceLaws:
    """What a backend says about its contents, and how it keeps its bound."""

    small_capacity_bytes: ClassVar[int] = 24 << 20
    """Capacity for the laws about eviction; some 90 records of 256 KiB."""

    record_bytes: ClassVar[int] = 256 << 10
    """Length of a record for the laws about eviction."""

    usage_is_exact: ClassVar[bool] = True
    """False for media that must list to count: between listings usage may then say up to twice too much."""

    def test_scan_lists_what_is_stored(self, backend: Backend, store: Store) -> None:
        put_all(backend, [item_of(i, 300 + i) for i in range(_LISTED)])
        backend.delete_many(names_of(range(0, _LISTED, 3)), call())
        if not store.has(Capability.SCAN):
            with pytest.raises(NotSupportedError):
                list(backend.scan())
            return
        model = {name_of(i): 300 + i for i in range(_LISTED) if i % 3}
        listed = [(info.name, info.nbytes) for info in backend.scan()]
        assert sorted(listed) == sorted(model.items())

    def test_scan_tells_ages_in_unix_seconds(self, backend: Backend, store: Store) -> None:
        start = time.time()
        put(backend, item_of("young"))
        if store.has(Capability.SCAN):
            (info,) = backend.scan()
            assert info.last_use == 0.0 or start - 5.0 <= info.last_use <= time.time() + 5.0

    def test_scan_goes_on_while_records_come_and_go(self, backend: Backend, store: Store) -> None:
        if not store.has(Capability.SCAN):
            return
        put_all(backend, [item_of(i, 300) for i in range(_LISTED)])
        seen: list[bytes] = []
        for n, info in enumerate(backend.scan()):
            seen.append(info.name)
            if n == 2:
                backend.delete_many(names_of(range(0, _LISTED, 2)), call())
                put(backend, item_of("late"))
        assert len(set(seen)) == len(seen)
        assert set(names_of(range(1, _LISTED, 2))) <= set(seen)

    def test_usage_counts_records_and_bytes(self, backend: Backend) -> None:
        before = backend.usage()
        assert before.records == 0
        put_all(backend, [item_of(i, 20_000) for i in range(20)])
        usage = backend.usage()
        assert 20 <= usage.records <= (20 if self.usage_is_exact else 40)
        assert usage.payload_bytes >= 20 * 20_000
        assert usage.payload_bytes <= before.payload_bytes + 20 * 20_000 * 2
        put(backend, item_of(0, 20_000))
        assert backend.usage().records == usage.records
        backend.delete_many(names_of(range(10)), call())
        assert backend.usage().records == usage.records - 10

    def test_usage_tells_the_capacity(self, store: Store) -> None:
        usage = store.open(capacity_bytes=store.target.capacity_bytes).usage()
        expected = {store.target.capacity_bytes} if store.has(Capability.EVICTS) else {0, store.target.capacity_bytes}
        assert usage.capacity_bytes in expected

    def _records(self, count: int, tag: str = "") -> list[PutItem]:
        return [item_of(f"{tag}{i}", self.record_bytes) for i in range(count)]

    def _fill(self, backend: Backend, items: list[PutItem]) -> list[PutStatus]:
        """Put in calls of the core's size; the bound must hold after each of them."""
        statuses: list[PutStatus] = []
        for start in range(0, len(items), _BATCH):
            statuses += put(backend, *items[start : start + _BATCH])
            backend.maintain()
            if Capability.EVICTS in backend.capabilities:
                usage = backend.usage()
                assert usage.payload_bytes <= usage.capacity_bytes
        return statuses

    def test_three_times_the_capacity_leaves_the_newest(self, store: Store) -> None:
        backend = store.open(capacity_bytes=self.small_capacity_bytes)
        items = self._records(3 * self.small_capacity_bytes // self.record_bytes)
        names = [item.name for item in items]
        statuses = self._fill(backend, items)
        there = stored_of(backend, names)
        if not store.has(Capability.EVICTS):
            assert set(statuses) <= {*STORED, PutStatus.FULL, PutStatus.TOO_LARGE}
            stored = {name for name, status in zip(names, statuses, strict=True) if status in STORED}
            kept = {name for name, here in zip(names, there, strict=True) if here}
            assert stored - kept == set(store.removed), "what leaves a medium by itself must be reported"
            return
        assert set(statuses) <= {PutStatus.STORED}
        newest = len(items) // 8
        assert all(there[-newest:])
        assert not any(there[:newest])
        assert sorted(set(store.removed)) == sorted(name for name, here in zip(names, there, strict=True) if not here)
        assert backend.usage().evicted == len(store.removed) == there.count(False)
        expected = [bytes_of(i, self.record_bytes) for i in range(len(items) - newest, len(items))]
        assert read(backend, names[-newest:]) == expected

    def test_used_records_outlive_unused_ones(self, store: Store) -> None:
        backend = store.open(capacity_bytes=self.small_capacity_bytes)
        fits = self.small_capacity_bytes // self.record_bytes
        items = self._records(fits * 6 // 10)
        self._fill(backend, items)
        used = [item.name for item in items[: len(items) // 3]]
        unused = [item.name for item in items[len(items) // 3 :]]
        for i in range(8):
            backend.touch_many(used[::-1])
            self._fill(backend, self._records(fits // 10, f"new {i} "))
        kept = [sum(stored_of(backend, names)) / len(names) for names in (used, unused)]
        if store.has(Capability.EVICTS) and type(backend).touch_many is not Backend.touch_many:
            assert kept[0] > kept[1], f"{kept[0]:.0%} of the used records are left, {kept[1]:.0%} of the others"

    def test_eviction_takes_tails_before_heads(self, store: Store) -> None:
        backend = store.open(capacity_bytes=self.small_capacity_bytes)
        fits = self.small_capacity_bytes // self.record_bytes
        sequence = self._records(fits * 6 // 10)  # item 0 is the head of a prompt
        self._fill(backend, sequence[::-1])
        names = [item.name for item in sequence]
        backend.touch_many(names[::-1])
        backend.maintain()
        for i in range(12):
            self._fill(backend, self._records(fits // 16, f"new {i} "))
            there = stored_of(backend, names)
            half = len(names) // 2
            if store.has(Capability.EVICTS):
                assert sum(there[:half]) >= sum(there[-half:])

    def test_a_record_above_the_capacity_is_refused_alone(self, store: Store) -> None:
        backend = store.open(capacity_bytes=self.small_capacity_bytes)
        large = named(name_of("large"), bytes(self.small_capacity_bytes + (1 << 20)))
        statuses = put(backend, item_of(1), large, item_of(2))
        assert [statuses[0], statuses[2]] == [PutStatus.STORED] * 2
        refused = {PutStatus.TOO_LARGE, PutStatus.FULL}
        assert statuses[1] in (refused if store.has(Capability.EVICTS) else {*refused, PutStatus.STORED})
        assert stored_of(backend, [large.name]) == [statuses[1] is PutStatus.STORED]
        assert read(backend, names_of([1, 2])) == [bytes_of(i, 5000) for i in (1, 2)]

    def test_touches_of_anything_are_harmless(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in range(4)])
        backend.touch_many(names_of([3, "absent", 2, 1, 0, 0]))
        backend.maintain()
        assert read(backend, names_of([*range(4), "absent"])) == [*(bytes_of(i, 5000) for i in range(4)), None]

    def test_upkeep_is_harmless(self, backend: Backend) -> None:
        put_all(backend, [item_of(i) for i in range(10)])
        epoch = backend.epoch(b"n" * 16)
        for _ in range(5):
            backend.maintain()
        assert read(backend, names_of(range(10))) == [bytes_of(i, 5000) for i in range(10)]
        assert backend.epoch(b"n" * 16) == epoch

    def test_the_batch_shape_is_sensible_and_stays(self, backend: Backend) -> None:
        shape = backend.batch_shape()
        assert 1 <= shape.blocks <= 4096
        assert 1 << 16 <= shape.nbytes <= 1 << 30
        assert 1 <= shape.align <= shape.blocks
        assert backend.batch_shape() == shape
