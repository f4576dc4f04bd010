"""What is remembered saves requests, and ends with the event that contradicts it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvstore.backend import PutItem
from kvstore.objects.medium import ObjectInfo
from kvstore.objects.naming import key_of
from kvstore.types import Call, Presence, PutStatus
from tests.unit.objects.conftest import Opener
from tests.unit.objects.mem import PREFIX, MemMedium, call_for, chain, content, items_of, put, read

NAMES = chain("remembering", 320)
FORGETFUL: dict[str, object] = {"positive_ttl_s": 0.0, "negative_ttl_s": 0.0}


def presence(backend: object, names: list[bytes]) -> int:
    """Leading names that are said to be present."""
    found = backend.exists_many(names, call_for(names, leading_only=True))  # type: ignore[attr-defined]
    return next((k for k, answer in enumerate(found) if answer is not Presence.PRESENT), len(names))


def test_a_second_lookup_of_a_known_prompt_is_free(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 320))
    backend = opener(medium, {"threads": 4})
    assert presence(backend, NAMES) == 320
    medium.count.clear()
    assert presence(backend, NAMES) == 320
    assert presence(backend, NAMES[:100]) == 100
    assert not medium.count


def test_a_known_prompt_is_looked_up_again_once_a_part_is_missed(opener: Opener, medium: MemMedium) -> None:
    for settings in ({"threads": 4}, FORGETFUL):
        put(opener(medium), items_of(NAMES, 0, 320))
        backend = opener(medium, settings)
        assert presence(backend, NAMES) == 320
        del medium.objects[key_of(NAMES[175])]
        found = read(backend, NAMES, call_for(NAMES))
        assert [k for k in range(320) if found[k] is None] == list(range(160, 176))
        assert presence(backend, NAMES) == 160
        put(backend, items_of(NAMES, 160, 176))
        assert presence(backend, NAMES) == 320


def test_a_delete_ends_what_is_known_of_a_prompt(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 320))
    backend = opener(medium, {"threads": 4})
    assert presence(backend, NAMES) == 320
    assert backend.delete_many(NAMES[40:41], call_for(NAMES)) == 1
    assert presence(backend, NAMES) == 32


def test_what_a_listing_showed_is_read_and_deleted_by_name_alone(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 46))
    backend = opener(medium)
    names = [record.name for record in backend.scan()]
    assert read(backend, names[:3]) == [content(name) for name in names[:3]]
    assert read(backend, names[10:30]) == [content(name) for name in names[10:30]]
    assert set(backend.exists_many(names, Call.within(9.0))) == {Presence.PRESENT}
    assert backend.delete_many(names, Call.within(9.0)) == 46
    assert not medium.records()


def test_a_listing_does_not_push_out_what_readers_know(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 320))
    backend = opener(medium, {"remembered_names": 16})
    assert presence(backend, NAMES[:16]) == 16
    assert len(list(backend.scan())) == 320
    medium.count.clear()
    assert presence(backend, NAMES[:16]) == 16
    assert not medium.count


def test_a_name_that_was_missing_a_moment_ago_is_not_asked_for_again(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium, {"negative_ttl_s": 60.0})
    for _ in range(50):
        assert read(backend, NAMES[:1], call_for(NAMES[:1])) == [None]
    assert medium.count["read"] == 1
    put(backend, items_of(NAMES, 0, 1))
    assert read(backend, NAMES[:1], call_for(NAMES[:1])) == [content(NAMES[0])]
    assert read(backend, [NAMES[5], NAMES[0]]) == [None, content(NAMES[0])]


def test_what_a_read_finds_missing_is_not_counted_any_more(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    singles = [chain(k, 1)[0] for k in range(20)]
    put(backend, [PutItem(name, [content(name)]) for name in singles])
    assert backend.usage().records == 20
    for name in singles[::2]:
        del medium.objects[key_of(name)]
    for _ in range(2):
        assert read(backend, singles) == [content(n) if k % 2 else None for k, n in enumerate(singles)]
    usage = backend.usage()
    assert (usage.records, usage.payload_bytes) == (10, sum(len(s.data) for s in medium.objects.values()))


def test_deleting_what_another_process_wrote_takes_nothing_of_ours_off(opener: Opener, medium: MemMedium) -> None:
    backend, other = opener(medium), opener(medium)
    put(backend, items_of(NAMES, 0, 16))
    other_names = chain("other", 16)
    put(other, items_of(other_names, 0, 16))
    assert backend.delete_many(other_names, call_for(other_names)) == 16
    assert backend.usage().records == 16


class Coarse(MemMedium):
    """Tells the age of notes in whole seconds and that of records exactly."""

    def entries(self, prefix: str, call: Call) -> Iterator[ObjectInfo]:
        for info in super().entries(prefix, call):
            modified = float(int(info.modified)) if info.key.startswith("drops/") else info.modified
            yield ObjectInfo(info.key, info.nbytes, modified, info.blocks)


def test_a_drop_takes_what_was_written_in_the_same_second(opener: Opener) -> None:
    medium = Coarse(clock=lambda: 1000.9)
    backend = opener(medium)
    put(backend, items_of(NAMES, 0, 32))
    backend.drop(PREFIX[:16])
    deadline = time.monotonic() + 5.0
    while medium.records() and time.monotonic() < deadline:
        backend.maintain()
    assert not medium.records()


def test_replacing_an_object_counts_the_difference(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    put(backend, items_of(NAMES, 15, 16))
    assert set(put(backend, items_of(NAMES, 0, 16))) == {PutStatus.STORED}
    usage = backend.usage()
    assert (usage.records, usage.payload_bytes) == (16, sum(len(s.data) for s in medium.objects.values()))


@dataclass
class OvertakenMedium(MemMedium):
    """Somebody deletes a record after the medium has done something with it and before that is told."""

    overtake: Callable[[], object] | None = None

    def _overtaken(self) -> None:
        overtake, self.overtake = self.overtake, None
        if overtake is not None:
            thread = threading.Thread(target=overtake)
            thread.start()
            thread.join(9.0)
            assert not thread.is_alive()

    def write(self, key: str, buffers: Sequence[memoryview | bytes], call: Call, *, once: bool, blocks: int) -> bool:
        written = super().write(key, buffers, call, once=once, blocks=blocks)
        self._overtaken()
        return written

    def head(self, key: str, call: Call) -> ObjectInfo | None:
        found = super().head(key, call)
        self._overtaken()
        return found


@pytest.mark.parametrize("operation", ["put", "lookup"])
def test_a_delete_that_overtakes_another_thread_is_not_forgotten(opener: Opener, operation: str) -> None:
    medium = OvertakenMedium()
    backend = opener(medium)
    name = NAMES[:1]
    put(backend, items_of(NAMES, 0, 1))
    if operation == "put":
        backend.delete_many(name, Call.within(9.0))
    else:
        backend = opener(medium)  # which has to ask
    medium.overtake = lambda: backend.delete_many(name, Call.within(9.0))
    if operation == "put":
        put(backend, items_of(NAMES, 0, 1))
    else:
        backend.exists_many(name, Call.within(9.0))
    assert medium.overtake is None, "nothing was overtaken"
    assert not medium.records()
    assert backend.exists_many(name, Call.within(9.0)) == [Presence.ABSENT]
    put(backend, items_of(NAMES, 0, 1))
    medium.count.clear()
    assert backend.exists_many(name, Call.within(9.0)) == [Presence.PRESENT]
    assert not medium.count, "a put that began after the delete is known to be there"
