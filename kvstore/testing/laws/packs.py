"""Laws about runs of consecutive blocks, which a backend may keep as one object."""

from __future__ import annotations

from typing import Final

from kvstore.backend import Backend, Capability, PutItem
from kvstore.testing.samples import Received, bytes_of, call, chain, item_of, names_of, put, put_all, read
from kvstore.testing.store import Store
from kvstore.types import Presence, PutStatus, Run

_BLOCKS: Final = 40


def store_chain(backend: Backend, items: list[PutItem]) -> None:
    """Put a sequence as the core does: cut by the backend's batch shape, each batch tail first."""
    shape = backend.batch_shape()
    batch: list[PutItem] = []
    for item in items:
        batch.append(item)
        aligned = (item.hint.position + 1) % shape.align == 0
        nbytes = sum(one.nbytes for one in batch)
        if len(batch) >= shape.blocks or nbytes >= shape.nbytes or (aligned and shape.align > 1):
            put_all(backend, batch[::-1], most=len(batch))
            batch = []
    put_all(backend, batch[::-1])


def run_of(sequence: str, blocks: range) -> Run:
    """The run of a sequence's blocks."""
    return Run(blocks.start, tuple(names_of(f"{sequence}/{i}" for i in blocks)))


def data_of(sequence: str, blocks: range) -> list[bytes]:
    """What the records of a sequence hold."""
    return [bytes_of(f"{sequence}/{i}", 5000) for i in blocks]


class PackLaws:
    """``Call.run`` finds what was put as a run; without PACKS it changes nothing."""

    def test_a_run_is_found_again(self, backend: Backend) -> None:
        whole = range(_BLOCKS)
        store_chain(backend, chain("s", whole))
        run = run_of("s", whole)
        assert backend.exists_many(run.names, call(run=run)) == [Presence.PRESENT] * _BLOCKS
        assert read(backend, run.names, call(run=run)) == data_of("s", whole)

    def test_every_prefix_of_a_run_is_found(self, backend: Backend) -> None:
        store_chain(backend, chain("s", range(_BLOCKS)))
        for length in (1, 5, 16, 17, 31, 32, 39):
            blocks = range(length)
            run = run_of("s", blocks)
            found = backend.exists_many(run.names, call(run=run, leading_only=True))
            data = read(backend, run.names, call(run=run))
            present = [presence is Presence.PRESENT for presence in found]
            assert present == [one is not None for one in data], "existence and reads disagree about a prefix"
            assert [one for one in data if one is not None] == data_of("s", blocks)[: sum(present)]
            assert sum(present) >= length // 16 * 16, "whole packs of a prefix must be found"

    def test_some_names_of_a_run_are_read_alone(self, backend: Backend) -> None:
        whole = range(_BLOCKS)
        store_chain(backend, chain("s", whole))
        run = run_of("s", whole)
        for blocks in (range(7, 8), range(14, 18), range(20, 36), range(39, 40)):
            names = names_of(f"s/{i}" for i in blocks)
            assert read(backend, names, call(run=run)) == data_of("s", blocks)
            assert backend.exists_many(names, call(run=run)) == [Presence.PRESENT] * len(blocks)
            received = Received()
            statuses = backend.get_ranges(names, [(10, 60)] * len(blocks), received, call(run=run))
            assert received.of(statuses) == [data[10:60] for data in data_of("s", blocks)]

    def test_a_run_from_the_middle_is_found(self, backend: Backend) -> None:
        store_chain(backend, chain("s", range(_BLOCKS)))
        later = range(16, _BLOCKS)
        run = run_of("s", later)
        assert read(backend, run.names, call(run=run)) == data_of("s", later)

    def test_what_was_never_put_ends_a_run(self, backend: Backend) -> None:
        store_chain(backend, chain("s", range(20)))
        longer = run_of("s", range(36))
        expected = [*data_of("s", range(20)), *[None] * 16]
        assert read(backend, longer.names, call(run=longer)) == expected
        found = backend.exists_many(longer.names, call(run=longer, leading_only=True))
        assert found == [Presence.PRESENT] * 20 + [Presence.ABSENT] * 16
        strange = run_of("other", range(20))
        assert read(backend, strange.names, call(run=strange)) == [None] * 20

    def test_sequences_that_branch_keep_their_own_tails(self, backend: Backend) -> None:
        trunk = chain("trunk", range(16))
        store_chain(backend, [*trunk, *chain("left", range(16, 28))])
        store_chain(backend, [*trunk, *chain("right", range(16, 30))])
        for tail, blocks in (("left", range(16, 28)), ("right", range(16, 30))):
            names = (*run_of("trunk", range(16)).names, *run_of(tail, blocks).names)
            run = Run(0, names)
            assert read(backend, names, call(run=run)) == [*data_of("trunk", range(16)), *data_of(tail, blocks)]

    def test_a_run_that_grows_stays_whole(self, backend: Backend) -> None:
        """A conversation: each turn appends some blocks that were not there before."""
        end = 0
        for blocks in (3, 10, 1, 12, 9):
            store_chain(backend, chain("s", range(end, end + blocks)))
            end += blocks
            run = run_of("s", range(end))
            assert read(backend, run.names, call(run=run)) == data_of("s", range(end))

    def test_a_deleted_run_is_gone(self, backend: Backend) -> None:
        whole = range(_BLOCKS)
        store_chain(backend, chain("s", whole))
        store_chain(backend, chain("t", whole))
        run, other = run_of("s", whole), run_of("t", whole)
        assert backend.delete_many(run.names, call(run=run)) == _BLOCKS
        assert read(backend, run.names, call(run=run)) == [None] * _BLOCKS
        assert backend.exists_many(run.names, call(run=run)) == [Presence.ABSENT] * _BLOCKS
        assert read(backend, other.names, call(run=other)) == data_of("t", whole)

    def test_a_run_put_again_is_no_second_copy(self, backend: Backend) -> None:
        whole = range(32)
        store_chain(backend, chain("s", whole))
        before = backend.usage()
        store_chain(backend, chain("s", whole))
        after = backend.usage()
        assert (after.records, after.payload_bytes) == (before.records, before.payload_bytes)

    def test_records_without_a_place_are_found_with_and_without_a_run(self, backend: Backend) -> None:
        assert put(backend, *[item_of(f"s/{i}") for i in range(5)]) == [PutStatus.STORED] * 5
        run = run_of("s", range(5))
        assert read(backend, run.names, call(run=run)) == data_of("s", range(5))
        assert read(backend, run.names) == data_of("s", range(5))

    def test_without_packs_a_run_changes_nothing(self, backend: Backend, store: Store) -> None:
        if store.has(Capability.PACKS):
            return
        store_chain(backend, chain("s", range(8)))
        wrong = Run(3, tuple(names_of(["x", "y", *(f"s/{i}" for i in range(8))])))
        names = names_of(f"s/{i}" for i in range(8))
        assert read(backend, names, call(run=wrong)) == data_of("s", range(8))
        assert read(backend, names) == data_of("s", range(8))
