"""Media that fail, lie and hang: misses and statuses, never wrong bytes, never a stuck call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from kvstore.backend import PutItem
from kvstore.errors import (
    BackendError,
    BackendFullError,
    BackendPermissionError,
    BackendTimeoutError,
    BackendUnavailableError,
    ClosedError,
    ConfigError,
    NotSupportedError,
)
from kvstore.objects.naming import key_of
from kvstore.objects.pack import seal
from kvstore.types import Call, Presence, PutStatus, ReadStatus
from tests.unit.objects.conftest import Opener
from tests.unit.objects.mem import Fault, MemMedium, Stored, call_for, chain, content, items_of, put, read

NAMES = chain("faults", 64)
EXPECTED = [content(name) for name in NAMES]


def broken(operation: str, key: str, error: type[BackendError]) -> Fault:
    return lambda op, k: error("injected") if op == operation and k == key else None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BackendTimeoutError, PutStatus.TIMEOUT),
        (BackendUnavailableError, PutStatus.UNAVAILABLE),
        (BackendPermissionError, PutStatus.DENIED),
        (BackendFullError, PutStatus.FULL),
        (NotSupportedError, PutStatus.READ_ONLY),
        (BackendError, PutStatus.UNAVAILABLE),
    ],
)
def test_a_failing_object_fails_its_own_records_only(
    opener: Opener, medium: MemMedium, error: type[BackendError], status: PutStatus
) -> None:
    medium.fault = broken("write", key_of(NAMES[31]), error)
    backend = opener(medium)
    statuses = put(backend, items_of(NAMES, 0, 64))[::-1]
    assert statuses == [status if 16 <= k < 32 else PutStatus.STORED for k in range(64)]
    assert read(backend, NAMES, call_for(NAMES)) == [None if 16 <= k < 32 else d for k, d in enumerate(EXPECTED)]
    medium.fault = None
    assert set(put(backend, items_of(NAMES, 16, 32))) == {PutStatus.STORED}
    assert read(backend, NAMES, call_for(NAMES)) == EXPECTED


@pytest.mark.parametrize("operation", ["read", "body"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BackendTimeoutError, ReadStatus.TIMEOUT),
        (BackendUnavailableError, ReadStatus.UNAVAILABLE),
        (BackendPermissionError, ReadStatus.DENIED),
    ],
)
def test_a_failing_read_is_told_for_its_own_names_only(
    opener: Opener, medium: MemMedium, operation: str, error: type[BackendError], status: ReadStatus
) -> None:
    put(opener(medium), items_of(NAMES, 0, 64))
    medium.fault = broken(operation, key_of(NAMES[31]), error)
    backend = opener(medium)
    found: dict[int, bytes] = {}
    statuses = backend.get_many(NAMES, lambda i, v: found.__setitem__(i, bytes(v)), call_for(NAMES))
    assert statuses == [status if 16 <= k < 32 else ReadStatus.OK for k in range(64)]
    assert found == {k: d for k, d in enumerate(EXPECTED) if not 16 <= k < 32}
    presence = backend.exists_many(NAMES, call_for(NAMES))
    assert presence[:16] == [Presence.PRESENT] * 16


def test_a_failing_lookup_is_unknown_not_absent(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 64))
    medium.fault = broken("head", key_of(NAMES[31]), BackendUnavailableError)
    for leading in (True, False):
        found = opener(medium).exists_many(NAMES, call_for(NAMES, leading_only=leading))
        assert Presence.ABSENT not in found
        assert found[:16] == [Presence.PRESENT] * 16
    medium.fault = lambda *_: BackendUnavailableError("down")
    assert opener(medium).exists_many(NAMES, call_for(NAMES)) == [Presence.UNKNOWN] * 64
    assert opener(medium).exists_many(NAMES, Call.within(9.0)) == [Presence.UNKNOWN] * 64


def test_a_medium_that_hangs_gives_unknown_at_the_deadline(opener: Opener, medium: MemMedium) -> None:
    gate, stuck = threading.Event(), threading.Event()
    backend = opener(medium, settings={"threads": 4})
    caller = threading.current_thread()

    def hang(_operation: str, _key: str) -> None:
        if threading.current_thread() is not caller:
            stuck.set()
            gate.wait(20)
        else:
            stuck.wait(20)

    medium.fault = hang
    started = time.monotonic()
    found = backend.exists_many(NAMES, Call.within(0.3))
    assert time.monotonic() - started < 5.0
    assert Presence.UNKNOWN in found
    started = time.monotonic()
    backend.close()
    assert time.monotonic() - started < 5.0
    gate.set()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "one less": lambda data: data[:-1],
    "one more": lambda data: data + b"\0",
    "twice": lambda data: data + data,
    "zeros": lambda data: bytes(len(data)),
    "html": lambda data: b"<html>captive portal</html>" * 400,
    "flipped index": lambda data: data[:60] + bytes([data[60] ^ 4]) + data[61:],
}


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_object_is_a_miss_that_is_not_offered_again(
    opener: Opener, medium: MemMedium, damage: str, tells: bool
) -> None:
    put(opener(medium), items_of(NAMES, 0, 64))
    key = key_of(NAMES[31])
    medium.tells_blocks = tells
    medium.objects[key] = Stored(DAMAGES[damage](medium.objects[key].data), 1.0, 16)
    backend = opener(medium)
    assert read(backend, NAMES, call_for(NAMES)) == [None if 16 <= k < 32 else d for k, d in enumerate(EXPECTED)]
    assert key not in medium.objects
    assert opener(medium).exists_many(NAMES, call_for(NAMES)).count(Presence.ABSENT) == 16
    assert set(put(backend, items_of(NAMES, 16, 32))) == {PutStatus.STORED}
    assert read(backend, NAMES, call_for(NAMES)) == EXPECTED


@pytest.mark.parametrize("damage", ["empty", "zeros", "half"])
def test_a_put_replaces_a_damaged_object(opener: Opener, damage: str) -> None:
    medium = MemMedium(tells_blocks=False)
    put(opener(medium), items_of(NAMES, 0, 16))
    (key,) = medium.records()
    medium.objects[key] = Stored(DAMAGES[damage](medium.objects[key].data), 1.0, 0)
    backend = opener(medium)
    assert set(put(backend, items_of(NAMES, 0, 16))) == {PutStatus.STORED}
    assert read(backend, NAMES[:16], call_for(NAMES[:16])) == EXPECTED[:16]


def test_a_read_only_opener_removes_nothing(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 16))
    key = key_of(NAMES[15])
    medium.objects[key] = Stored(b"damaged", 1.0, 16)
    backend = opener(medium, read_only=True)
    assert read(backend, NAMES[:16], call_for(NAMES[:16])) == [None] * 16
    backend.discard(NAMES[15], 0)
    backend.drop(NAMES[0][:16])
    backend.touch_many(NAMES)
    backend.maintain()
    assert medium.objects[key].data == b"damaged"
    assert put(backend, items_of(NAMES, 0, 2)) == [PutStatus.READ_ONLY] * 2
    with pytest.raises(BackendPermissionError):
        backend.delete_many(NAMES[:1], Call.within(9.0))
    assert backend.epoch(bytes(16)) == bytes(8)
    with pytest.raises(BackendPermissionError):
        backend.epoch(bytes(16), bump=True)


def test_swapped_single_objects_reach_the_core_which_can_tell(opener: Opener, medium: MemMedium) -> None:
    """The backend hands over what lies under the key; the record itself says whose it is."""
    backend = opener(medium)
    put(backend, [PutItem(name, [content(name)]) for name in NAMES[:2]])
    a, b = key_of(NAMES[0]), key_of(NAMES[1])
    medium.objects[a], medium.objects[b] = medium.objects[b], medium.objects[a]
    fresh = opener(medium)
    assert read(fresh, NAMES[:2]) == [content(NAMES[1]), content(NAMES[0])]
    checksum = int.from_bytes(content(NAMES[1])[184:192], "little")
    fresh.discard(NAMES[0], checksum ^ 1)
    assert a in medium.objects
    fresh.discard(NAMES[0], checksum)
    assert a not in medium.objects
    assert fresh.exists_many(NAMES[:2], Call.within(9.0)) == [Presence.ABSENT, Presence.PRESENT]


def test_a_pack_under_another_key_serves_no_other_names(opener: Opener, medium: MemMedium) -> None:
    put(opener(medium), items_of(NAMES, 0, 32))
    medium.objects[key_of(NAMES[31])] = medium.objects[key_of(NAMES[15])]
    found = read(opener(medium), NAMES[:32], call_for(NAMES[:32]))
    assert found == [*EXPECTED[:16], *[None] * 15, content(NAMES[15])]  # the last one's record tells the core


def test_names_of_other_forms_are_compared_in_full(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    put(backend, [PutItem(b"short", [b"mine"])])
    data = seal([PutItem(b"other", [b"evil"])]) + b"evil"
    medium.objects[key_of(b"short")] = Stored(data, 1.0, 1)
    assert read(opener(medium), [b"short"]) == [None]


def test_an_object_that_vanished_is_a_miss_and_forgotten(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    put(backend, items_of(NAMES, 0, 16))
    medium.objects.clear()
    assert backend.exists_many(NAMES[:16], call_for(NAMES[:16])) == [Presence.PRESENT] * 16  # remembered
    assert read(backend, NAMES[:16], call_for(NAMES[:16])) == [None] * 16
    assert backend.exists_many(NAMES[:16], call_for(NAMES[:16])) == [Presence.ABSENT] * 16
    medium.count.clear()
    assert backend.exists_many(NAMES[:16], call_for(NAMES[:16])) == [Presence.ABSENT] * 16
    assert not medium.count
    assert set(put(backend, items_of(NAMES, 0, 16))) == {PutStatus.STORED}
    assert read(backend, NAMES[:16], call_for(NAMES[:16])) == EXPECTED[:16]


def test_a_remembered_absence_ends_by_itself(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium, settings={"negative_ttl_s": 0.05})
    assert backend.exists_many(NAMES[:1], Call.within(9.0)) == [Presence.ABSENT]
    put(opener(medium), [PutItem(NAMES[0], [b"x"])])
    deadline = time.monotonic() + 5.0
    while backend.exists_many(NAMES[:1], Call.within(9.0)) != [Presence.PRESENT]:
        assert time.monotonic() < deadline


def test_what_callbacks_raise_comes_through_and_bodies_are_closed(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    put(backend, items_of(NAMES, 0, 64))

    def receive(i: int, view: memoryview) -> None:
        if i == 20:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        backend.get_many(NAMES, receive, call_for(NAMES))
    assert all(body.closed for body in medium.bodies)
    assert read(backend, NAMES, call_for(NAMES)) == EXPECTED


def test_a_name_given_twice_is_read_twice(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    put(backend, items_of(NAMES, 0, 16))
    names = [NAMES[3], NAMES[5], NAMES[3], NAMES[3]]
    assert read(backend, names, call_for(NAMES[:16])) == [content(name) for name in names]


def test_put_of_one_name_twice_in_a_call_is_one_record(opener: Opener, medium: MemMedium) -> None:
    backend = opener(medium)
    items = [PutItem(NAMES[0], [b"first"]), PutItem(NAMES[0], [b"second"])]
    assert put(backend, items) == [PutStatus.STORED, PutStatus.EXISTS]
    assert read(backend, NAMES[:1]) == [b"first"]


def test_a_closed_backend_says_so_and_closes_again(opener: Opener) -> None:
    backend = opener()
    with pytest.raises(ConfigError):
        backend.open(backend._session.store.context)  # type: ignore[union-attr]
    backend.close()
    backend.close()
    for use in (backend.usage, backend.maintain, lambda: backend.epoch(bytes(16)), lambda: read(backend, NAMES)):
        with pytest.raises(ClosedError):
            use()


def test_an_inherited_backend_says_so(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ClosedError, match="fork"):
        backend.usage()
    monkeypatch.undo()
    backend.usage()


@pytest.mark.parametrize("settings", [{"pack_blocks": 3}, {"pack_blocks": 0}, {"pack_blocks": 512}, {"threads": 0}])
def test_impossible_settings_are_refused_at_open(opener: Opener, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        opener(settings=settings)
