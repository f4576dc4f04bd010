"""What one process sees of the records it stores."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest
from kvstore_lmdb.backend import LmdbBackend

from kvstore.backend import Capability, PutItem
from kvstore.errors import ClosedError, ConfigError
from kvstore.types import Call, Presence, PutStatus, ReadStatus
from tests.unit.lmdb.stores import Opener, bytes_of, call, item_of, name_of, put, read


@pytest.mark.parametrize("nbytes", [0, 1, 191, 1900, 2100, 4080, 4081, 65536, 300_000, 2_097_152 + 320])
def test_a_record_comes_back_bit_for_bit(backend: LmdbBackend, nbytes: int) -> None:
    assert put(backend, item_of("a", nbytes)) == [PutStatus.STORED]
    assert read(backend, [name_of("a")]) == [bytes_of("a", nbytes)]


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_a_gather_list_becomes_one_record(backend: LmdbBackend, parts: int) -> None:
    data = np.frombuffer(bytes_of("g", 900_000), np.uint8)
    buffers = [part.data for part in np.array_split(data, parts)]
    assert put(backend, PutItem(name_of("g"), buffers)) == [PutStatus.STORED]
    assert read(backend, [name_of("g")]) == [data.tobytes()]


@pytest.mark.parametrize("name", [b"\0", b"\xff" * 255, bytes(range(1, 256)), b"\0" * 49])
def test_names_are_opaque_bytes(backend: LmdbBackend, name: bytes) -> None:
    assert put(backend, PutItem(name, [b"head", b"payload"])) == [PutStatus.STORED]
    assert read(backend, [name]) == [b"headpayload"]
    assert [i.name for i in backend.scan()] == [name]


@pytest.mark.parametrize("name", [b"", b"x" * 512])
def test_a_name_that_cannot_be_stored_is_refused_and_absent(backend: LmdbBackend, name: bytes) -> None:
    assert put(backend, PutItem(name, [b"x"])) == [PutStatus.TOO_LARGE]
    assert read(backend, [name]) == [None]
    assert backend.exists_many([name], call()) == [Presence.ABSENT]
    assert backend.delete_many([name], call()) == 0


def test_statuses_follow_the_order_of_the_names(backend: LmdbBackend) -> None:
    put(backend, *[item_of(i) for i in range(0, 100, 2)])
    names = [name_of(i) for i in range(100)]
    order: list[int] = []
    statuses = backend.get_many(names, lambda i, _: order.append(i), call())
    assert statuses == [ReadStatus.OK, ReadStatus.ABSENT] * 50
    assert order == list(range(0, 100, 2))
    assert backend.exists_many(names, call()) == [Presence.PRESENT, Presence.ABSENT] * 50


def test_empty_batches_do_nothing(backend: LmdbBackend) -> None:
    assert put(backend) == []
    assert read(backend, []) == []
    assert backend.exists_many([], call()) == []
    assert backend.delete_many([], call()) == 0
    backend.touch_many([])


def test_put_twice_is_one_record(backend: LmdbBackend) -> None:
    assert put(backend, item_of(1), item_of(2), item_of(1)) == [PutStatus.STORED, PutStatus.STORED, PutStatus.EXISTS]
    assert put(backend, PutItem(name_of(1), [b"other bytes"])) == [PutStatus.EXISTS]
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]
    assert backend.usage().records == 2


def test_delete_counts_what_was_there(backend: LmdbBackend) -> None:
    put(backend, item_of(1), item_of(2))
    assert backend.delete_many([name_of(1), name_of(3), name_of(1)], call()) == 1
    assert read(backend, [name_of(1), name_of(2)]) == [None, bytes_of(2, 5000)]
    assert put(backend, item_of(1)) == [PutStatus.STORED]


def test_discard_drops_only_the_record_it_means(backend: LmdbBackend) -> None:
    head = bytes_of("head", 184) + struct.pack("<Q", 2**63 + 7)
    put(backend, PutItem(name_of(1), [head, b"payload"]), PutItem(name_of(2), [b"shorter than a header"]))
    backend.discard(name_of(1), 7)
    assert read(backend, [name_of(1)]) == [head + b"payload"]
    backend.discard(name_of(1), 2**63 + 7)
    backend.discard(name_of(2), 7)
    backend.discard(name_of(3), 7)
    assert read(backend, [name_of(1), name_of(2)]) == [None, None]
    assert backend.usage().records == 0


def test_leading_only_stops_at_the_first_hole(backend: LmdbBackend) -> None:
    put(backend, item_of(0), item_of(1), item_of(3))
    names = [name_of(i) for i in range(4)]
    seen: list[int] = []
    leading = Call.within(5, leading_only=True)
    statuses = backend.get_many(names, lambda i, _: seen.append(i), leading)
    assert statuses == [ReadStatus.OK, ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.SKIPPED]
    assert seen == [0, 1]
    assert backend.exists_many(names, leading) == [Presence.PRESENT] * 2 + [Presence.ABSENT] * 2


def test_a_cancelled_read_skips_the_rest(backend: LmdbBackend) -> None:
    put(backend, item_of(0), item_of(1))
    limits = call()
    statuses = backend.get_many([name_of(0), name_of(1)], lambda _i, _v: limits.cancel(), limits)
    assert statuses == [ReadStatus.OK, ReadStatus.SKIPPED]


def test_a_late_call_ends_with_timeouts(backend: LmdbBackend) -> None:
    put(backend, item_of(0))
    late = Call(deadline=0.0)
    assert backend.get_many([name_of(0)], lambda _i, _v: None, late) == [ReadStatus.TIMEOUT]
    assert backend.exists_many([name_of(0)], late) == [Presence.UNKNOWN]
    assert backend.put_many([item_of(1)], late) == [PutStatus.TIMEOUT]
    assert read(backend, [name_of(1)]) == [None]


def test_a_put_waits_for_the_writer_only_until_its_deadline(backend: LmdbBackend) -> None:
    session = backend._session
    assert session is not None
    assert session.store is not None
    with session.store.write_lock:
        assert backend.put_many([item_of(1)], Call.within(0.02)) == [PutStatus.TIMEOUT]
    assert put(backend, item_of(1)) == [PutStatus.STORED]


@pytest.mark.parametrize("error", [ValueError("receive"), OSError("receive"), KeyboardInterrupt()])
def test_an_exception_of_receive_propagates_and_leaves_no_reader(backend: LmdbBackend, error: BaseException) -> None:
    put(backend, item_of(0))

    def receive(_i: int, _view: memoryview) -> None:
        raise error

    with pytest.raises(type(error)):
        backend.get_many([name_of(0)], receive, call())
    assert read(backend, [name_of(0)]) == [bytes_of(0, 5000)]
    assert backend._session is not None
    assert backend._session.store is not None
    assert backend._session.store.gate.inside == 0
    rows = backend._session.store.env.readers().splitlines()[1:]
    assert all(row.split()[-1] == "-" for row in rows)


def test_a_view_ends_with_its_call(backend: LmdbBackend) -> None:
    put(backend, item_of(0))
    views: list[memoryview] = []
    backend.get_many([name_of(0)], lambda _i, view: views.append(view), call())
    with pytest.raises(ValueError, match="released"):
        bytes(views[0])


def test_a_stored_record_does_not_alias_the_callers_buffer(backend: LmdbBackend) -> None:
    data = bytearray(bytes_of("mine", 400_000))
    put(backend, PutItem(name_of("mine"), [bytes(data[:192]), memoryview(data)[192:]]))
    data[:] = bytes(len(data))
    assert read(backend, [name_of("mine")]) == [bytes_of("mine", 400_000)]


def test_reads_longer_than_a_transaction_may_last_still_see_everything(backend: LmdbBackend) -> None:
    put(backend, *[item_of(i, 3 << 20) for i in range(12)])  # 36 MiB: at least two read transactions
    names = [name_of(i) for i in range(12)]
    assert read(backend, names) == [bytes_of(i, 3 << 20) for i in range(12)]


def test_scan_lists_every_record_once(backend: LmdbBackend) -> None:
    sizes = {name_of(i): 200 + i for i in range(1100)}  # more than two portions of a scan
    put(backend, *[item_of(i, 200 + i) for i in range(1100)])
    found = list(backend.scan())
    assert {i.name: i.nbytes for i in found} == sizes
    assert len(found) == len(sizes)
    assert {i.head_bytes for i in found} == {192}


def test_scan_tells_codec_and_last_use(backend: LmdbBackend) -> None:
    head = b"KVB\x01" + struct.pack("<HHIH", 1, 192, 0, 2) + bytes(178)
    put(backend, PutItem(name_of(1), [head, b"x" * 100]), item_of(2))
    infos = {i.name: i for i in backend.scan()}
    assert (infos[name_of(1)].codec_id, infos[name_of(2)].codec_id) == (2, -1)
    assert infos[name_of(1)].payload_bytes == 100
    assert infos[name_of(2)].last_use > infos[name_of(1)].last_use > 1.7e9


def test_scan_may_be_left_half_way(backend: LmdbBackend) -> None:
    put(backend, *[item_of(i, 200) for i in range(600)])
    next(backend.scan())
    assert backend._session is not None
    assert backend._session.store is not None
    assert backend._session.store.gate.inside == 0


def test_capabilities_say_what_the_medium_does() -> None:
    c = Capability
    assert LmdbBackend.capabilities == c.PERSISTENT | c.SHARED | c.CALLER_READS | c.SCAN | c.EVICTS


def test_every_call_after_close_raises(opener: Opener) -> None:
    backend = opener()
    backend.close()
    backend.close()
    calls = [
        lambda: put(backend, item_of(1)),
        lambda: read(backend, [name_of(1)]),
        lambda: backend.exists_many([name_of(1)], call()),
        lambda: backend.delete_many([name_of(1)], call()),
        lambda: backend.discard(name_of(1), 0),
        lambda: backend.epoch(b"n" * 16),
        lambda: backend.touch_many([name_of(1)]),
        lambda: backend.drop(b"n"),
        lambda: list(backend.scan()),
        backend.usage,
        backend.maintain,
        backend.describe,
    ]
    for use in calls:
        with pytest.raises(ClosedError):
            use()


def test_a_backend_opens_once_and_again_after_close(backend: LmdbBackend) -> None:
    put(backend, item_of(1))
    context = backend._session._context  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="open already"):
        backend.open(context)
    backend.close()
    backend.open(context)
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]


def test_eight_threads_see_each_others_records(backend: LmdbBackend) -> None:
    wrong: list[int] = []

    def work(t: int) -> None:
        for i in range(20):
            put(backend, item_of(f"{t}-{i}", 20_000))
            other = f"{(t + 1) % 8}-{i}"
            found = read(backend, [name_of(other)])[0]
            if found not in {None, bytes_of(other, 20_000)}:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert read(backend, [name_of(f"{t}-{i}") for t in range(8) for i in range(20)]) == [
        bytes_of(f"{t}-{i}", 20_000) for t in range(8) for i in range(20)
    ]
