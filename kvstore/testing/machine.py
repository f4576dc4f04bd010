"""Random sequences of calls against a dict, on one backend."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvstore.backend import Backend, Capability, PutItem
from kvstore.testing.samples import STORED, Received, bytes_of, call, read, read_scattered
from kvstore.testing.store import Store
from kvstore.types import Presence, PutStatus, ReadStatus

_IDS: Final = st.lists(st.integers(0, 11), min_size=1, max_size=6)
_runs: Final = itertools.count()


class BackendMachine(RuleBasedStateMachine):
    """Puts, reads, deletes and reopens; the model says what must be there.

    Make one for a place with :func:`machine_of`, then run it with
    ``hypothesis.stateful.run_state_machine_as_test``.  Every run uses names of its own, so that the place
    need not be emptied.  Nothing may be evicted: give the place more room than the runs fill.

    Attributes:
        store: The place.
        model: Bytes by record number.
    """

    store: ClassVar[Store]

    @initialize()
    def start(self) -> None:
        self.prefix = f"run {next(_runs)} ".encode()
        self.model: dict[int, bytes] = {}
        self.version = 0
        self.epoch = b""
        self.backend: Backend = self.store.open()

    def _names(self, ids: list[int]) -> list[bytes]:
        return [self.prefix + bytes([i]) * (1 + 7 * i) for i in ids]

    def _expected(self, ids: list[int]) -> list[bytes | None]:
        return [self.model.get(i) for i in ids]

    @rule(ids=_IDS, nbytes=st.sampled_from([0, 1, 191, 300, 5000]))
    def put(self, ids: list[int], nbytes: int) -> None:
        """Content is a function of the name and a version, so that replacing and refusing both show."""
        self.version += 1
        data = {i: bytes_of(f"{i} in version {self.version}", nbytes) for i in ids}
        items = [PutItem(name, [data[i]]) for i, name in zip(ids, self._names(ids), strict=True)]
        statuses = self.backend.put_many(items, call())
        assert set(statuses) <= STORED
        for i, status in zip(ids, statuses, strict=True):
            if status is PutStatus.STORED:
                self.model[i] = data[i]
            assert i in self.model, "EXISTS for a name that was not stored"

    @rule(ids=_IDS)
    def get(self, ids: list[int]) -> None:
        assert read(self.backend, self._names(ids)) == self._expected(ids)

    @rule(ids=_IDS, cut=st.integers(0, 6000))
    def read_many(self, ids: list[int], cut: int) -> None:
        found = read_scattered(self.backend, self._names(ids), lambda m: [memoryview(m)[:cut], memoryview(m)[cut:]])
        assert found == self._expected(ids)

    @rule(ids=_IDS, start=st.integers(0, 6000), nbytes=st.integers(0, 6000))
    def get_ranges(self, ids: list[int], start: int, nbytes: int) -> None:
        received = Received()
        ranges = [(start, start + nbytes)] * len(ids)
        statuses = self.backend.get_ranges(self._names(ids), ranges, received, call())
        expected = [None if data is None else data[start : start + nbytes] for data in self._expected(ids)]
        assert received.of(statuses) == expected

    @rule(ids=_IDS)
    def leading(self, ids: list[int]) -> None:
        received = Received()
        statuses = self.backend.get_many(self._names(ids), received, call(leading_only=True))
        expected = self._expected(ids)
        hole = next((i for i, data in enumerate(expected) if data is None), len(ids))
        assert received.of(statuses)[:hole] == expected[:hole]
        assert statuses[hole : hole + 1] in ([], [ReadStatus.ABSENT])

    @rule(ids=_IDS)
    def exists(self, ids: list[int]) -> None:
        found = self.backend.exists_many(self._names(ids), call())
        assert found == [Presence.ABSENT if data is None else Presence.PRESENT for data in self._expected(ids)]

    @rule(ids=_IDS)
    def delete(self, ids: list[int]) -> None:
        there = {i for i in ids if i in self.model}
        assert self.backend.delete_many(self._names(ids), call()) == len(there)
        for i in there:
            del self.model[i]

    @rule(i=st.integers(0, 11), right=st.booleans())
    def discard(self, i: int, right: bool) -> None:
        data = self.model.get(i, b"")
        checksum = int.from_bytes(data[184:192].ljust(8, b"\0"), "little")
        self.backend.discard(self._names([i])[0], checksum if right else checksum ^ 1)
        if len(data) < 192 or right:
            self.model.pop(i, None)

    @rule(ids=_IDS)
    def touch(self, ids: list[int]) -> None:
        self.backend.touch_many(self._names(ids))
        self.backend.maintain()

    @rule()
    def reopen(self) -> None:
        self.backend.close()
        self.backend = self.store.open()
        if not self.store.has(Capability.PERSISTENT):
            self.model.clear()
            self.epoch = b""

    @rule(bump=st.booleans())
    def ask_for_the_epoch(self, bump: bool) -> None:
        epoch = self.backend.epoch(b"machine" + bytes(9), bump=bump)
        assert len(epoch) == 8
        assert not self.epoch or (epoch == self.epoch) is not bump
        self.epoch = epoch

    @rule()
    def scan(self) -> None:
        if self.store.has(Capability.SCAN):
            listed = {info.name: info.nbytes for info in self.backend.scan() if info.name.startswith(self.prefix)}
            model = zip(self._names(list(self.model)), self.model.values(), strict=True)
            assert listed == {name: len(data) for name, data in model}

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self.backend.close()


def machine_of(store: Store) -> type[BackendMachine]:
    """Return the machine for one place."""
    members: dict[str, Any] = {"store": store, "__doc__": BackendMachine.__doc__}
    return type(f"{store.target.plugin.title().replace('-', '')}Machine", (BackendMachine,), members)
