"""``orphaned_bytes`` of an LMDB store: exactly the records whose parent was stored and has left."""

from __future__ import annotations

import random

import pytest
from kvstore_lmdb import kinship, notes
from kvstore_lmdb.entry import Entry, sequence_key

from kvstore.backend import PutHint
from tests.unit.lmdb.stores import LmdbBackend, Opener, PutItem, bytes_of, call, name_of, put, read

RECORD_BYTES = 5000


def block(chain: int, i: int, nbytes: int = RECORD_BYTES) -> PutItem:
    """Block ``i`` of a chain, as the core hands it over."""
    parent = name_of(f"{chain}/{i - 1}") if i else b""
    return PutItem(name_of(f"{chain}/{i}"), [bytes_of(f"{chain}/{i}", nbytes)], PutHint(parent, i))


def orphaned(backend: LmdbBackend) -> int:
    return backend.usage().orphaned_bytes


def test_a_whole_chain_has_no_orphans_in_whatever_order_it_came(backend: LmdbBackend) -> None:
    put(backend, *[block(1, i) for i in range(9, -1, -1)])
    put(backend, *[block(2, i) for i in range(10)])
    for i in (3, 1, 0, 2):
        put(backend, block(3, i))

    assert orphaned(backend) == 0


def test_a_suffix_whose_parent_never_came_is_no_orphan(backend: LmdbBackend) -> None:
    put(backend, *[block(1, i) for i in (7, 6, 5)])

    assert orphaned(backend) == 0


def test_children_of_what_left_are_orphans_until_it_is_back(backend: LmdbBackend) -> None:
    put(backend, *[block(1, i) for i in range(5)])
    backend.delete_many([name_of("1/1")], call())
    assert orphaned(backend) == RECORD_BYTES  # block 2; 3 and 4 have their parents

    put(backend, block(1, 1))
    assert orphaned(backend) == 0

    backend.delete_many([name_of("1/1")], call())
    backend.delete_many([name_of("1/2")], call())
    assert orphaned(backend) == RECORD_BYTES  # block 3 now
    backend.delete_many([name_of(f"1/{i}") for i in (0, 3, 4)], call())
    assert orphaned(backend) == 0


def test_the_count_survives_a_restart(opener: Opener) -> None:
    backend = opener()
    put(backend, *[block(1, i) for i in range(3)])
    backend.delete_many([name_of("1/0")], call())
    backend.close()

    assert orphaned(opener()) == RECORD_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_agree_with_a_model(backend: LmdbBackend, seed: int) -> None:
    rng = random.Random(seed)
    live: dict[tuple[int, int], int] = {}
    left: set[tuple[int, int]] = set()
    for _ in range(150):
        chain, start, n = rng.randrange(3), rng.randrange(12), rng.randrange(1, 9)
        chosen = [(chain, i) for i in range(start, min(start + n, 12))]
        if rng.random() < 0.5:
            if rng.random() < 0.5:
                chosen.reverse()
            size = 300 + rng.randrange(3) * 4096
            put(backend, *[block(*c, size) for c in chosen])
            for c in chosen:
                live.setdefault(c, size)
        elif rng.random() < 0.8:
            backend.delete_many([name_of(f"{c}/{i}") for c, i in chosen], call())
            left |= live.keys() & chosen
            for c in chosen:
                live.pop(c, None)
        else:
            backend.touch_many([name_of(f"{c}/{i}") for c, i in chosen])
            backend.maintain()
        # a parent counts as gone only while somebody remembers it: until its last child is gone
        left = {c for c in left if (c[0], c[1] + 1) in live and c not in live}
        expected = sum(size for (c, i), size in live.items() if (c, i - 1) in left)
        assert orphaned(backend) == expected
    backend.delete_many([name_of(f"{c}/{i}") for c in range(3) for i in range(12)], call())
    assert orphaned(backend) == 0
    assert totals(backend) == (0, 0)


def totals(backend: LmdbBackend) -> tuple[int, int]:
    assert backend._session is not None
    environment = backend._session.store
    assert environment is not None
    with environment.env.begin() as txn:
        return kinship.totals(environment, txn)


def test_eviction_in_the_order_of_puts_orphans_nothing(opener: Opener) -> None:
    backend = opener(capacity_bytes=1 << 20)
    for chain in range(30):
        put(backend, *[block(chain, i) for i in range(19, -1, -1)])
        assert orphaned(backend) == 0
    assert backend.usage().evicted > 0


def test_eviction_that_beheads_shows(opener: Opener) -> None:
    backend = opener(capacity_bytes=1 << 20)
    for chain in range(30):
        put(backend, *[block(chain, i) for i in range(20)])  # head first: the head is the oldest
    assert orphaned(backend) >= RECORD_BYTES


def test_a_store_of_format_1_is_read_and_upgraded(opener: Opener) -> None:
    backend = opener()
    put(backend, *[block(1, i) for i in range(3)])
    assert backend._session is not None
    environment = backend._session.store
    assert environment is not None
    trees = environment.trees
    with environment.env.begin(write=True) as txn:  # what format 1 had
        txn.put(b"format", (1).to_bytes(8, "little"), db=trees.notes)
        txn.delete(b"kin", db=trees.notes)
        for i in range(3):
            name = name_of(f"1/{i}")
            line = txn.get(name, db=trees.index)
            assert line is not None
            txn.put(name, bytes(line)[:18], db=trees.index)
    backend.close()

    again = opener()

    assert read(again, [name_of("1/2")]) == [bytes_of("1/2", RECORD_BYTES)]
    assert {info.payload_bytes + info.head_bytes for info in again.scan()} == {RECORD_BYTES}
    put(again, *[block(1, i) for i in range(5)])
    again.delete_many([name_of("1/2")], call())
    assert orphaned(again) == RECORD_BYTES  # block 3, stored by format 2
    assert again._session is not None
    assert again._session.store is not None
    with again._session.store.env.begin(db=again._session.store.trees.notes) as txn:
        assert txn.get(b"format") == (2).to_bytes(8, "little")
    assert notes.FORMAT_VERSION == 2


def test_an_index_line_round_trips() -> None:
    entry = Entry(7, 5000, 192, 3, 0, b"p" * 49)
    line = entry.pack(children_bytes=9)

    assert Entry.parse(line) == Entry(7, 5000, 192, 3, 9, b"p" * 49)
    assert line.startswith(sequence_key(7))
