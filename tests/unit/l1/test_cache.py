from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import CapacityError, ClosedError, ConfigError
from kvstore.l1.cache import L1Cache
from kvstore.l1.policies.lru import LruPolicy
from kvstore.spec import BlockSpec
from tests.support_l1 import Chain, Content, MakeL1, Put, check_books, read


def test_published_blocks_come_back_bit_for_bit(make_l1: MakeL1, chain: Chain, put: Put, content: Content) -> None:
    l1, key = make_l1(8), chain("a", 5)
    put(l1, key)
    entries = l1.pin_leading(key)

    assert [e.digest for e in entries] == key
    assert [read(l1, e) for e in entries] == [content(d, l1.spec.nbytes).tobytes() for d in key]
    l1.unpin(entries)
    check_books(l1)


def test_the_first_hole_ends_the_prefix(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(8), chain("a", 6)
    put(l1, key)
    l1.delete([key[3]])

    assert l1.leading(key) == 3
    assert l1.leading(key, 4) == 2
    assert l1.leading(key, 3) == 0
    assert l1.leading([]) == 0
    assert l1.contains(key) == [True, True, True, False, True, True]
    pinned = l1.pin_leading(key)
    assert len(pinned) == 3
    each = l1.pin_each(key)
    assert [e is not None for e in each] == l1.contains(key)
    l1.unpin(pinned)
    l1.unpin([e for e in each if e is not None])
    assert l1.counters.pinned_blocks == 0


def test_looking_pins_nothing_and_touches_no_recency(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, old, new = make_l1(8), chain("old", 4), chain("new", 4)
    put(l1, old)
    put(l1, new)
    for _ in range(10):
        assert l1.leading(old) == 4
        assert all(l1.contains(old))
        l1.unpin(l1.pin_leading(old))
    assert l1.counters.pinned_blocks == 0

    assert len(put(l1, chain("more", 4))) == 4
    assert l1.contains(old) == [False] * 4
    assert l1.contains(new) == [True] * 4


def test_a_touched_request_stays(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, old, new = make_l1(8), chain("old", 4), chain("new", 4)
    put(l1, old)
    put(l1, new)
    l1.touch([*old, *chain("unknown", 2)])
    put(l1, chain("more", 4))

    assert l1.leading(old) == 4
    assert l1.leading(new) == 0


def test_10000_gets_at_three_times_the_capacity_leave_no_pin(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(10)
    keys = [chain(str(i), 3) for i in range(10)]
    for key in keys:
        put(l1, key)
    for i in range(10_000):
        l1.unpin(l1.pin_leading(keys[i % 10]))

    assert l1.counters.pinned_blocks == 0
    assert len(put(l1, chain("new", 10))) == 10


def test_a_block_published_twice_is_one_entry(make_l1: MakeL1, chain: Chain, content: Content) -> None:
    l1, key = make_l1(8), chain("a", 2)
    first, second = l1.reserve(2), l1.reserve(2)
    for slots in (first, second):
        for slot, digest in zip(slots, key, strict=True):
            l1.pool.payload(slot)[:] = content(digest, l1.spec.nbytes)
    items = [(key[0], None), (key[1], key[0])]
    one = l1.publish(items, first, pins=1)
    two = l1.publish(items, second, pins=2)

    assert all(a is b for a, b in zip(one, two, strict=True))
    assert [e.pins for e in one] == [3, 3]
    assert l1.pool.n_free == 6
    for _ in range(3):
        l1.unpin(one)
    check_books(l1)


def test_a_block_twice_in_one_publish_is_one_entry(make_l1: MakeL1, chain: Chain) -> None:
    l1, digest = make_l1(4), chain("a", 1)[0]
    one, two = l1.publish([(digest, None)] * 2, l1.reserve(2), pins=1)

    assert one is two
    assert one.pins == 2
    l1.unpin([one, two])
    check_books(l1)


def test_a_deleted_block_is_gone_at_once_and_readable_while_pinned(
    make_l1: MakeL1, chain: Chain, put: Put, content: Content
) -> None:
    l1, key = make_l1(4), chain("a", 4)
    entries = put(l1, key, pins=1)
    assert l1.delete([*key[:2], *chain("unknown", 3)]) == 2
    assert l1.contains(key) == [False, False, True, True]
    assert l1.pool.n_free == 0
    assert l1.reserve(1) == []

    assert read(l1, entries[0]) == content(key[0], l1.spec.nbytes).tobytes()
    l1.unpin(entries)
    assert l1.pool.n_free == 2
    assert put(l1, key[:1])[0] is not entries[0]
    check_books(l1)


def test_clear_forgets_every_block_and_keeps_pinned_bytes(
    make_l1: MakeL1, chain: Chain, put: Put, content: Content
) -> None:
    l1, key = make_l1(8), chain("a", 6)
    put(l1, key)
    held = l1.pin_leading(key[:2])
    l1.clear()

    assert l1.generation == 1
    assert l1.contains(key) == [False] * 6
    assert l1.counters.resident_blocks == 0
    assert l1.counters.orphaned_bytes == 0
    assert len(put(l1, chain("b", 8))) == 6
    assert [read(l1, e) for e in held] == [content(d, l1.spec.nbytes).tobytes() for d in key[:2]]
    l1.unpin(held)
    check_books(l1)


def test_a_read_that_ends_after_clear_does_not_resurrect_its_block(
    make_l1: MakeL1, chain: Chain, content: Content
) -> None:
    l1, key = make_l1(4), chain("a", 2)
    asked_at = l1.generation
    slots = l1.reserve(2)
    for slot, digest in zip(slots, key, strict=True):
        l1.pool.payload(slot)[:] = content(digest, l1.spec.nbytes)
    l1.clear()
    entries = l1.publish([(key[0], None), (key[1], key[0])], slots, pins=1, generation=asked_at)

    assert l1.leading(key) == 0
    assert [read(l1, e) for e in entries] == [content(d, l1.spec.nbytes).tobytes() for d in key]
    assert l1.counters.pinned_blocks == 2
    l1.unpin(entries)
    assert l1.pool.n_free == 4
    l1.publish([(key[0], None)], l1.reserve(1), generation=asked_at)
    assert l1.pool.n_free == 4
    l1.publish([(key[0], None)], l1.reserve(1), generation=l1.generation)
    assert l1.leading(key) == 1


def test_a_pin_is_given_back_once(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(4)
    entries = put(l1, chain("a", 2), pins=1)
    l1.pin(entries)
    l1.unpin(entries)
    l1.unpin(entries)

    with pytest.raises(ValueError, match="unpinned more often"):
        l1.unpin(entries)
    assert l1.counters.pinned_blocks == 0
    check_books(l1)


def test_an_entry_that_has_left_cannot_be_pinned(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1 = make_l1(4)
    (evicted,) = put(l1, chain("a", 1))
    put(l1, chain("b", 4))

    with pytest.raises(ValueError, match="cannot be pinned"):
        l1.pin([evicted])


def test_a_closed_cache_says_so_and_close_may_be_repeated(make_l1: MakeL1, chain: Chain, put: Put) -> None:
    l1, key = make_l1(4), chain("a", 2)
    entries = put(l1, key, pins=1)
    l1.close()
    l1.close()
    l1.unpin(entries)

    calls: Sequence[Callable[[], object]] = (
        lambda: l1.leading(key),
        lambda: l1.contains(key),
        lambda: l1.pin_leading(key),
        lambda: l1.pin_each(key),
        lambda: l1.reserve(1),
        lambda: l1.publish([], []),
        lambda: l1.touch(key),
        lambda: l1.delete(key),
        l1.clear,
        l1.drain_evicted,
    )
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert l1.counters.resident_blocks == 0
    assert l1.counters.pinned_blocks == 0


def test_bad_capacities_are_refused(spec: BlockSpec) -> None:
    with pytest.raises(CapacityError, match=r"l1\.capacity is 100 bytes"):
        L1Cache(spec, 100, lambda _: LruPolicy())
    with pytest.raises(ConfigError, match=r"l1\.capacity"):
        L1Cache(spec, 1 << 60, lambda _: LruPolicy())


def test_real_kv_bytes_survive_a_slot(chain: Chain) -> None:
    block = np.load(Path(__file__).parents[2] / "data" / "bf16_prose_b000_16tok_LCND.npy")
    spec = BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
    assert block.shape == spec.shape
    l1 = L1Cache(spec, 2 * (spec.nbytes + 8192), lambda _: LruPolicy())
    (slot,) = l1.reserve(1)
    l1.pool.payload(slot)[:] = block.reshape(-1).view(np.uint8)
    (entry,) = l1.publish([(chain("real", 1)[0], None)], [slot])

    assert read(l1, entry) == block.tobytes()
    l1.close()
