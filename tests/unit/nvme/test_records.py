"""What goes in comes out, at every size and through every way of reading."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from kvstore_nvme.slot import PAGE_BYTES

from kvstore.backend import RecordInfo
from kvstore.types import Call, Presence, PutStatus, ReadStatus
from tests.unit.nvme.stores import (
    MIB,
    NvmeBackend,
    Opener,
    PutItem,
    bytes_of,
    call,
    item_of,
    name_of,
    put,
    read,
    read_into,
)

SIZES = [0, 1, 223, 224, 225, 3982, 3983, 3984, 4095, 4096, 4097, 8192, 65_536, 65_760, 1 << 20, (2 << 20) + 224]


@pytest.fixture(params=["direct", "buffered"])
def backend(opener: Opener, request: pytest.FixtureRequest) -> NvmeBackend:
    made = opener(options={} if request.param == "direct" else {"direct": False})
    if not made.describe()["io"].startswith(request.param):
        pytest.skip("this file system refuses direct I/O")
    return made


def test_every_size_comes_back_by_every_way_of_reading(backend: NvmeBackend) -> None:
    items = [item_of(n, n) for n in SIZES]
    expected = [bytes_of(n, n) for n in SIZES]
    names = [item.name for item in items]
    assert put(backend, *items) == [PutStatus.STORED] * len(items)
    assert read(backend, names) == expected
    assert read_into(backend, names) == expected
    for start, stop in [(0, 1), (100, 5000), (4096, 8192), (70_000, 1 << 30), (1 << 30, 1 << 31)]:
        found: dict[int, bytes] = {}
        ranges = [(start, stop)] * len(names)
        backend.get_ranges(names, ranges, lambda i, view, f=found: f.__setitem__(i, bytes(view)), call())  # type: ignore[misc]
        assert [found[i] for i in range(len(names))] == [data[start:stop] for data in expected]


@pytest.mark.parametrize("head_bytes", [0, 1, 192, 3983, 3984, 9000])
def test_every_length_of_head_comes_back_and_is_told(backend: NvmeBackend, head_bytes: int) -> None:
    data = bytes_of(head_bytes, 20_000)
    item = PutItem(name_of(1), [data[:head_bytes], data[head_bytes:]], head_bytes=head_bytes)
    assert put(backend, item) == [PutStatus.STORED]
    assert read(backend, [name_of(1)]) == [data]
    infos: list[RecordInfo] = []

    def place(i: int, info: RecordInfo) -> Sequence[memoryview]:
        infos.append(info)
        out.append(bytearray(info.nbytes))
        view = memoryview(out[i])
        return [view[:7], view[7:7], view[7:12_345], view[12_345:]]

    out: list[bytearray] = []
    assert backend.read_many([name_of(1)], place, lambda _: None, call()) == [ReadStatus.OK]
    assert bytes(out[0]) == data
    assert (infos[0].head_bytes, infos[0].nbytes) == (head_bytes, 20_000)


@pytest.mark.parametrize("shift", [0, 1, 64, 512, 4095])
def test_buffers_at_any_address_are_stored_as_they_are(backend: NvmeBackend, shift: int) -> None:
    memory = mmap.mmap(-1, MIB)
    data = bytes_of(shift, 300_000)
    memory[shift : shift + 300_000] = data
    view = memoryview(memory)[shift : shift + 300_000]
    pieces = [view[:224], view[224:70_000], view[70_000 : 70_000 + 8192], view[78_192:]]
    assert put(backend, PutItem(name_of(1), pieces)) == [PutStatus.STORED]
    assert read(backend, [name_of(1)]) == [data]


def test_very_many_small_buffers_make_one_record(backend: NvmeBackend) -> None:
    data = bytes_of("many", 30_000)
    item = PutItem(name_of(1), [data[i : i + 10] for i in range(0, 30_000, 10)], head_bytes=100)
    assert put(backend, item) == [PutStatus.STORED]
    assert read_into(backend, [name_of(1)]) == [data]


def test_bytes_beside_a_record_never_reach_the_disk(backend: NvmeBackend, tmp_path: Any) -> None:
    marker = b"SECRET-BESIDE-THE-VIEW"
    memory = bytearray(marker * 1000)
    memory[5000:11_000] = bytes(6000)
    put(backend, PutItem(name_of(1), [memoryview(memory)[5000:11_000]]))
    put(backend, PutItem(name_of(2), [memoryview(bytearray(9000))]))
    backend.close()
    for path in (tmp_path / "store").glob("seg-*"):
        assert marker not in path.read_bytes()


def test_a_stored_name_exists_and_keeps_its_bytes(backend: NvmeBackend) -> None:
    assert put(backend, item_of(1), item_of(1), item_of(2)) == [PutStatus.STORED, PutStatus.EXISTS, PutStatus.STORED]
    other = PutItem(name_of(1), [b"something else"])
    assert put(backend, other) == [PutStatus.EXISTS]
    assert read(backend, [name_of(1), name_of(2)]) == [bytes_of(1, 5000), bytes_of(2, 5000)]
    assert backend.usage().records == 2


def test_one_bad_item_does_not_touch_its_neighbours(opener: Opener) -> None:
    backend = opener(block_bytes=65_536)
    items = [item_of(1), PutItem(b"", [b"x"]), PutItem(b"n" * 256, [b"x"]), item_of(2, 40 * MIB), item_of(3)]
    large = PutStatus.TOO_LARGE
    assert put(backend, *items) == [PutStatus.STORED, large, large, large, PutStatus.STORED]
    assert read(backend, [name_of(1), name_of(3)]) == [bytes_of(1, 5000), bytes_of(3, 5000)]


def test_names_of_1_to_255_bytes_work(backend: NvmeBackend) -> None:
    names = [b"a", b"\0", b"../../x", b"\xff" * 255, b"a" * 254]
    assert put(backend, *(PutItem(n, [n * 50]) for n in names)) == [PutStatus.STORED] * 5
    assert read(backend, names) == [n * 50 for n in names]
    assert sorted(info.name for info in backend.scan()) == sorted(names)


def test_leading_only_ends_at_the_first_hole(backend: NvmeBackend) -> None:
    put(backend, item_of(0), item_of(1), item_of(3))
    names = [name_of(i) for i in range(4)]
    leading = Call.within(30, leading_only=True)
    got: list[int] = []
    statuses = backend.get_many(names, lambda i, _: got.append(i), leading)
    assert statuses == [ReadStatus.OK, ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.SKIPPED]
    assert got == [0, 1]
    assert backend.exists_many(names, leading)[2:] == [Presence.ABSENT] * 2
    assert backend.exists_many(names, call())[3] is Presence.PRESENT


def test_a_call_that_is_over_reads_and_stores_nothing(backend: NvmeBackend) -> None:
    put(backend, item_of(1))
    late = Call.within(0.0)
    assert backend.get_many([name_of(1)], lambda *_: pytest.fail("delivered"), late) == [ReadStatus.TIMEOUT]
    assert backend.put_many([item_of(2)], late) == [PutStatus.TIMEOUT]
    cancelled = call()
    cancelled.cancel()
    assert backend.get_many([name_of(1)], lambda *_: pytest.fail("delivered"), cancelled) == [ReadStatus.SKIPPED]
    assert read(backend, [name_of(2)]) == [None]


def test_what_is_placed_nowhere_is_left_out(backend: NvmeBackend) -> None:
    put(backend, *(item_of(i) for i in range(4)))
    done: list[int] = []
    out = [bytearray(5000) for _ in range(4)]
    backend.read_many(
        [name_of(i) for i in range(4)], lambda i, _: None if i == 1 else [memoryview(out[i])], done.append, call()
    )
    assert done == [0, 2, 3]
    assert [bytes(out[i]) for i in done] == [bytes_of(i, 5000) for i in done]


def test_an_exception_in_receive_reaches_the_caller_and_leaves_the_store_usable(backend: NvmeBackend) -> None:
    put(backend, item_of(1))

    def receive(i: int, view: memoryview) -> None:
        raise KeyError(i)

    with pytest.raises(KeyError):
        backend.get_many([name_of(1)], receive, call())
    assert read(backend, [name_of(1)]) == [bytes_of(1, 5000)]


def test_the_store_may_be_used_inside_receive(backend: NvmeBackend) -> None:
    put(backend, *(item_of(i, 60_000) for i in range(8)))
    found: dict[int, bytes] = {}

    def receive(i: int, view: memoryview) -> None:
        assert read(backend, [name_of(7 - i)]) == [bytes_of(7 - i, 60_000)]
        put(backend, item_of(f"inside-{i}", 70_000))
        found[i] = bytes(view)

    backend.get_many([name_of(i) for i in range(8)], receive, call())
    assert found == {i: bytes_of(i, 60_000) for i in range(8)}


def test_deleted_records_are_gone(backend: NvmeBackend) -> None:
    put(backend, item_of(1), item_of(2))
    assert backend.delete_many([name_of(1), name_of(9), name_of(1)], call()) == 1
    assert read(backend, [name_of(1), name_of(2)]) == [None, bytes_of(2, 5000)]
    assert put(backend, item_of(1)) == [PutStatus.STORED]


@pytest.mark.parametrize("nbytes", [100, 192, 5000, 100_000])
def test_discard_spares_a_record_that_was_repaired(backend: NvmeBackend, nbytes: int) -> None:
    put(backend, item_of(1, nbytes))
    checksum = int.from_bytes(bytes_of(1, nbytes)[184:192], "little") if nbytes >= 192 else 0
    backend.discard(name_of(1), checksum + 1)
    assert (read(backend, [name_of(1)]) == [None]) == (nbytes < 192)
    backend.discard(name_of(1), checksum)
    assert read(backend, [name_of(1)]) == [None]


def test_dropped_prefixes_are_reclaimed_in_the_background(opener: Opener) -> None:
    backend = opener()
    old = [PutItem(b"old" + name_of(i)[3:], [bytes_of(i, 5000)]) for i in range(200)]
    put(backend, *old, item_of("other"))
    backend.drop(b"old")
    backend.close()
    again = opener()
    for _ in range(20):
        again.maintain()
    assert [info.name for info in again.scan()] == [name_of("other")]
    assert again.usage().payload_bytes == 3 * PAGE_BYTES  # the head with the slot header, the rest in two


def test_records_survive_a_restart(opener: Opener) -> None:
    backend = opener()
    put(backend, *(item_of(i, 10_000 + i) for i in range(50)))
    epoch = backend.epoch(b"n" * 16)
    infos = sorted((i.name, i.nbytes, i.head_bytes) for i in backend.scan())
    backend.close()
    again = opener()
    assert read(again, [name_of(i) for i in range(50)]) == [bytes_of(i, 10_000 + i) for i in range(50)]
    assert again.epoch(b"n" * 16) == epoch
    assert sorted((i.name, i.nbytes, i.head_bytes) for i in again.scan()) == infos


def test_threads_put_read_and_evict_at_once_without_a_wrong_byte(opener: Opener) -> None:
    backend = opener(capacity_bytes=8 * MIB, block_bytes=65_536)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            some = [rng.randrange(400) for _ in range(8)]
            sizes = [3000 + i * 331 % 120_000 for i in some]
            backend.put_many([item_of(i, n) for i, n in zip(some, sizes, strict=True)], call())
            asked = [rng.randrange(400) for _ in range(16)]
            for how in (read, read_into):
                for i, found in zip(asked, how(backend, [name_of(i) for i in asked]), strict=True):
                    if found not in {None, bytes_of(i, 3000 + i * 331 % 120_000)}:
                        wrong.append(f"{how.__name__} {i}")
            if rng.random() < 0.1:
                backend.delete_many([name_of(rng.randrange(400))], call())
            backend.touch_many([name_of(i) for i in asked])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert backend.usage().evicted > 0
