from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvstore.errors import ClosedError
from kvstore.l1.cache import L1Cache
from kvstore.l1.entry import Entry
from kvstore.l1.index import BlockId
from kvstore.l1.reservation import Reservation

Chain = Callable[[str, int], list[bytes]]
MakeL1 = Callable[..., L1Cache]
Put = Callable[..., list[Entry]]


def ids(key: list[bytes]) -> list[BlockId]:
    return list(zip(key, [None, *key[:-1]], strict=True))


def allocate(l1: L1Cache, key: list[bytes], on_commit: Callable[[list[Entry]], None] | None = None) -> Reservation:
    return Reservation(l1, ids(key), l1.reserve(len(key)), on_commit=on_commit)


def test_commit_publishes_what_was_written(make_l1: MakeL1, chain: Chain) -> None:
    l1, key = make_l1(8), chain("a", 3)
    entries: list[Entry] = []
    with allocate(l1, key, entries.extend) as reservation:
        assert reservation.blocks == len(reservation) == 3
        for i, tensor in enumerate(reservation.tensors):
            assert tuple(tensor.shape) == l1.spec.shape
            assert tensor.dtype is torch.bfloat16
            tensor.fill_(i + 1)
        assert l1.leading(key) == 0
        assert reservation.commit() == 3

    assert [e.digest for e in entries] == key
    assert [e.parent for e in entries] == [None, *key[:-1]]
    assert l1.leading(key) == 3
    for i, entry in enumerate(entries):
        expected = torch.full(l1.spec.shape, i + 1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        assert l1.pool.payload(entry.slot).tobytes() == expected
    assert l1.counters.pinned_blocks == 0
    assert l1.pool.n_free == 5


def test_leaving_without_commit_discards(make_l1: MakeL1, chain: Chain) -> None:
    l1, key = make_l1(4), chain("a", 3)
    reservation = allocate(l1, key)
    reservation.tensors[0].zero_()
    with pytest.raises(RuntimeError, match="engine"), reservation:
        raise RuntimeError("engine")

    assert l1.leading(key) == 0
    assert len(l1.reserve(4)) == 4
    assert l1.counters.leases_dropped == 0


def test_a_part_can_be_committed(make_l1: MakeL1, chain: Chain) -> None:
    l1, key = make_l1(4), chain("a", 4)
    reservation = allocate(l1, key)
    with pytest.raises(ValueError, match="n_blocks=5; expected 0 to 4"):
        reservation.commit(5)
    with pytest.raises(ValueError, match="n_blocks=-1"):
        reservation.commit(-1)
    assert reservation.commit(2) == 2

    assert l1.contains(key) == [True, True, False, False]
    assert l1.pool.n_free == 2


def test_there_is_one_commit(make_l1: MakeL1, chain: Chain) -> None:
    l1, key = make_l1(4), chain("a", 2)
    reservation = allocate(l1, key)
    reservation.commit()
    with pytest.raises(ClosedError, match="committed or discarded"):
        reservation.commit()
    with pytest.raises(ClosedError, match="committed or discarded"):
        _ = reservation.tensors
    reservation.release()
    assert l1.leading(key) == 2

    discarded = allocate(l1, chain("b", 2))
    discarded.release()
    with pytest.raises(ClosedError, match="committed or discarded"):
        discarded.commit()
    assert l1.pool.n_free == 2


def test_the_hook_sees_pinned_entries_and_no_lock(make_l1: MakeL1, chain: Chain) -> None:
    l1, key = make_l1(4), chain("a", 4)
    seen: list[Entry] = []

    def queue(entries: list[Entry]) -> None:
        assert [e.pins for e in entries] == [1] * 4
        assert l1.reserve(1) == []  # L1 can be used, and cannot evict what the hook looks at
        l1.pin(entries[:1])
        seen.extend(entries)

    assert allocate(l1, key, queue).commit() == 4

    assert [e.pins for e in seen] == [1, 0, 0, 0]
    l1.unpin(seen[:1])


def test_a_failing_hook_leaves_no_pin(make_l1: MakeL1, chain: Chain) -> None:
    l1, key = make_l1(4), chain("a", 2)

    def queue(entries: list[Entry]) -> None:
        raise RuntimeError(f"no queue for {len(entries)} blocks")

    with pytest.raises(RuntimeError, match="no queue for 2"):
        allocate(l1, key, queue).commit()
    assert l1.counters.pinned_blocks == 0
    assert l1.leading(key) == 2


def test_a_dropped_reservation_gives_slots_back_with_the_last_view(make_l1: MakeL1, chain: Chain) -> None:
    l1 = make_l1(4)
    view = allocate(l1, chain("a", 4)).tensors[3][0]
    assert len(l1.reserve(4)) == 3

    del view
    assert len(l1.reserve(4)) == 1
    assert l1.counters.leases_dropped == 1


def test_a_reservation_dropped_untouched_comes_back(make_l1: MakeL1, chain: Chain) -> None:
    l1 = make_l1(4)
    allocate(l1, chain("a", 4))

    assert len(l1.reserve(4)) == 4
    assert l1.counters.leases_dropped == 1


def test_a_block_that_became_resident_meanwhile_wins(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(6), chain("a", 2)
    entries: list[Entry] = []
    reservation = allocate(l1, key, entries.extend)
    reservation.tensors[0].zero_()
    first = put(l1, key[:1])
    reservation.commit()

    assert entries[0] is first[0]
    assert np.any(l1.pool.payload(entries[0].slot))
    assert l1.counters.resident_blocks == 2
    assert l1.pool.n_free == 4


def test_fewer_slots_reserve_a_prefix(make_l1: MakeL1, chain: Chain) -> None:
    l1, key = make_l1(4), chain("a", 7)
    entries: list[Entry] = []
    reservation = allocate(l1, key, entries.extend)

    assert reservation.blocks == len(reservation.tensors) == 4
    assert reservation.commit() == 4
    assert [e.digest for e in entries] == key[:4]
