"""Backends on a shared, persistent medium that are wrong in one way each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from kvstore.backend import PutItem
from kvstore.plugins import Registry
from kvstore.testing.doubles import WrappingBackend
from kvstore.types import Call, Presence, PutStatus
from tests.conformance.catches import fails


class OnLmdb(WrappingBackend):
    """A shared, persistent medium to be wrong about."""

    def __init__(self) -> None:
        super().__init__(Registry.discover().create_backend("lmdb"))


@fails("another_opener_follows_a_bump", "a_bump_reaches_other_processes")
class EpochNotShared(OnLmdb):
    """Asks for the epoch once."""

    def __init__(self) -> None:
        super().__init__()
        self._epochs: dict[bytes, bytes] = {}

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        if bump or namespace not in self._epochs:
            self._epochs[namespace] = super().epoch(namespace, bump=bump)
        return self._epochs[namespace]


@fails("another_reader_sees_a_delete", "two_processes_share_one_store_at_once")
class RemembersAbsence(OnLmdb):
    """Remembers what is there and what is not, as if nobody else wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, Presence] = {}

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        if call.stop():
            return super().exists_many(names, call)
        asked = [name for name in names if name not in self._known]
        self._known.update(zip(asked, super().exists_many(asked, Call.within(30)), strict=True))
        return [self._known[name] for name in names]

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        statuses = super().put_many(items, call)
        self._known.update((item.name, Presence.PRESENT) for item in items)
        return statuses

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        self._known.clear()
        return super().delete_many(names, call)


@fails("a_killed_writer_leaves_whole_records")
class PublishesFirst(OnLmdb):
    """Publishes a record by its first half and completes it later."""

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        for item in items:
            if item.nbytes == 30_000 and super().exists_many([item.name], call) == [Presence.ABSENT]:
                super().put_many([PutItem(item.name, [b"".join(item.buffers)[:15_000]])], call)
                time.sleep(0.05)
                super().delete_many([item.name], call)
        return super().put_many(items, call)


@fails("a_killed_writer_leaves_whole_records")
class AnswersTooEarly(OnLmdb):
    """Says STORED and stores three calls later."""

    def __init__(self) -> None:
        super().__init__()
        self._late: deque[list[PutItem]] = deque()

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        if len(items) != 4 or items[0].nbytes != 30_000:
            return super().put_many(items, call)
        self._late.append([PutItem(i.name, [b"".join(i.buffers)]) for i in items])
        if len(self._late) > 3:
            super().put_many(self._late.popleft(), call)
        return [PutStatus.STORED] * len(items)
