"""Laws about one record: what goes in comes out, under any name and of any length."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from kvstore.backend import Backend, Capability, PutHint, PutItem
from kvstore.testing.samples import STORED, bytes_of, call, item_of, name_of, named, names_of, put, put_all, read
from kvstore.testing.store import Store
from kvstore.types import Presence, PutStatus, ReadStatus

SIZES: Final = (0, 1, 191, 192, 193, 4095, 4096, 4097, 100_000)
NAME_LENGTHS: Final = (1, 2, 3, 4, 8, 15, 16, 17, 32, 48, 49, 50, 64, 99, 100, 101, 127, 128, 129, 200, 254, 255)
_ODD_NAMES: Final = (b".", b"..", b"/", b"a/b", b"a/../b", b"\0", b"\0\0", b" ", b"\xff", b"%2F", b"~", b"-", b"CON")
_LARGEST: Final = 16 << 20  # 16 MiB: a block of 16 tokens of the largest models in use


class RecordLaws:
    """One record at a time."""

    def test_what_was_never_put_is_absent(self, backend: Backend) -> None:
        names = names_of(["never", "put"])
        assert read(backend, names) == [None, None]
        assert backend.get_many(names, lambda _i, _view: None, call()) == [ReadStatus.ABSENT] * 2
        assert backend.exists_many(names, call()) == [Presence.ABSENT] * 2

    def test_a_record_of_any_length_comes_back(self, backend: Backend) -> None:
        names = names_of(SIZES)
        assert put(backend, *[item_of(nbytes, nbytes) for nbytes in SIZES]) == [PutStatus.STORED] * len(SIZES)
        for nbytes, name in zip(SIZES, names, strict=True):
            assert read(backend, [name]) == [bytes_of(nbytes, nbytes)], f"a record of {nbytes} bytes"
        assert backend.exists_many(names, call()) == [Presence.PRESENT] * len(names)

    def test_a_record_of_16_mib_comes_back(self, store: Store) -> None:
        backend = store.open(block_bytes=_LARGEST)
        data = bytes_of("large", 1 << 20) * (_LARGEST >> 20)
        assert put(backend, named(name_of("large"), data)) == [PutStatus.STORED]
        assert read(backend, [name_of("large")]) == [data]

    def test_names_have_1_to_255_bytes(self, backend: Backend) -> None:
        names = [(bytes([length]) * 255)[:length] for length in NAME_LENGTHS]
        put_all(backend, [named(name, bytes_of(len(name), 300)) for name in names])
        assert read(backend, names) == [bytes_of(len(name), 300) for name in names]
        assert backend.exists_many(names, call()) == [Presence.PRESENT] * len(names)

    def test_names_may_hold_every_byte_value(self, backend: Backend) -> None:
        names = [bytes(range(start, start + 32)) for start in range(0, 256, 32)] + list(_ODD_NAMES)
        put_all(backend, [named(name, bytes_of(name.hex(), 300)) for name in names])
        assert read(backend, names) == [bytes_of(name.hex(), 300) for name in names]

    def test_a_name_that_starts_like_another_is_another(self, backend: Backend) -> None:
        long = name_of("long")
        names = [long[:17], long[:48], long, long + b"\0", long + long]
        put_all(backend, [named(name, bytes_of(len(name), 300)) for name in names[::2]])
        assert read(backend, names) == [bytes_of(len(n), 300) if i % 2 == 0 else None for i, n in enumerate(names)]

    def test_buffers_are_joined_in_their_order(self, backend: Backend) -> None:
        data = bytes_of("joined", 9000)
        view = memoryview(bytearray(data))
        mixed: list[memoryview | bytes]
        mixed = [data[:192], b"", view[192:193], memoryview(data)[193:4096], view[4096:4096], view[4096:], b""]
        crumbs: list[memoryview | bytes] = [data[i : i + 90] for i in range(0, 9000, 90)]
        words = memoryview(bytearray(data)).cast("H")
        put_all(backend, [PutItem(name_of(0), mixed), PutItem(name_of(1), crumbs)])
        put_all(backend, [PutItem(name_of(2), [words.cast("B")])])
        assert read(backend, names_of(range(3))) == [data] * 3

    def test_head_bytes_change_nothing_about_the_record(self, backend: Backend) -> None:
        data = bytes_of("head", 5000)
        shapes: dict[int, Sequence[memoryview | bytes]] = {
            0: [data[:208], data[208:]],
            208: [data],
            192: [data[:100], data[100:]],
            5000: [data],
        }
        put_all(backend, [PutItem(name_of(head), buffers, head_bytes=head) for head, buffers in shapes.items()])
        assert read(backend, names_of(shapes)) == [data] * 4

    def test_hints_change_nothing_about_the_record(self, backend: Backend) -> None:
        hints = [PutHint(), PutHint(b"", 0), PutHint(name_of("p"), 7, 3600.0), PutHint(b"x", 1 << 31)]
        put_all(backend, [PutItem(name_of(i), [bytes_of(i, 500)], hint) for i, hint in enumerate(hints)])
        assert read(backend, names_of(range(4))) == [bytes_of(i, 500) for i in range(4)]

    def test_the_callers_buffers_may_change_after_the_put(self, backend: Backend) -> None:
        data = bytes_of("mine", 70_000)
        mine = bytearray(data)
        assert put(backend, PutItem(name_of("mine"), [memoryview(mine)[:192], memoryview(mine)[192:]])) == [
            PutStatus.STORED
        ]
        mine[:] = bytes(len(mine))
        assert read(backend, [name_of("mine")]) == [data]

    def test_a_put_changes_no_buffer(self, backend: Backend) -> None:
        mine = bytearray(bytes_of("mine", 9000))
        put(backend, PutItem(name_of("mine"), [memoryview(mine)]))
        assert mine == bytes_of("mine", 9000)

    def test_a_received_view_is_plain_bytes(self, backend: Backend) -> None:
        put(backend, item_of("plain", 3000))
        seen: list[tuple[str, int, bool, int]] = []

        def receive(_: int, view: memoryview) -> None:
            seen.append((view.format, view.ndim, view.c_contiguous, view.nbytes))

        backend.get_many([name_of("plain")], receive, call())
        assert seen == [("B", 1, True, 3000)]

    def test_put_twice_is_one_record(self, backend: Backend, store: Store) -> None:
        item = item_of("twice")
        assert put(backend, item) == [PutStatus.STORED]
        allowed = {PutStatus.EXISTS} if store.has(Capability.CONDITIONAL_PUT) else STORED
        assert set(put(backend, item)) <= allowed
        assert read(backend, [item.name]) == [bytes_of("twice", 5000)]
        if store.has(Capability.SCAN):
            assert [info.name for info in backend.scan()] == [item.name]

    def test_other_bytes_under_a_name_are_all_old_or_all_new(self, backend: Backend) -> None:
        old, new = bytes_of("old", 6000), bytes_of("new", 4000)
        put(backend, named(name_of("n"), old))
        (status,) = put(backend, named(name_of("n"), new))
        (found,) = read(backend, [name_of("n")])
        assert (status, found) in [(PutStatus.EXISTS, old), (PutStatus.STORED, new)]

    def test_readers_never_see_a_mixture_of_two_records(self, backend: Backend) -> None:
        name, versions = name_of("n"), [bytes_of(i, nbytes) for i, nbytes in enumerate((30_000, 9_000))]
        ended = threading.Event()

        def write() -> None:
            for i in range(24):
                put(backend, named(name, versions[i % 2]))
                backend.delete_many([name], call())
            ended.set()

        writer = threading.Thread(target=write)
        writer.start()
        seen: set[bytes | None] = set()
        while not ended.is_set():
            seen.update(read(backend, [name]))
        writer.join()
        assert seen <= {None, *versions}
