from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction import EvictionPolicy
from kvstore.l1.policies.fifo import FifoPolicy
from kvstore.l1.policies.lru import LruPolicy
from kvstore.l1.policies.prefix_lru import PrefixLruPolicy
from kvstore.l1.policies.s3fifo import S3FifoPolicy

CAPACITY = 10

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda _: LruPolicy(),
    "prefix-lru": lambda _: PrefixLruPolicy(),
    "fifo": lambda _: FifoPolicy(),
    "s3fifo": S3FifoPolicy,
}


def name(i: int) -> bytes:
    return i.to_bytes(32, "big")


def names(ids: Sequence[int]) -> list[bytes]:
    return [name(i) for i in ids]


def always(_: bytes) -> bool:
    return True


class Model(Protocol):
    """What a policy should do, on plain lists of resident ids; next victim first."""

    def insert(self, ids: list[int]) -> None: ...
    def touch(self, ids: list[int]) -> None: ...
    def remove(self, i: int) -> None: ...
    def evict(self, pinned: set[int]) -> int | None: ...
    def resident(self) -> set[int]: ...


class QueueModel:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.queue: list[int] = []

    def insert(self, ids: list[int]) -> None:
        self.queue += ids if self.kind == "lru" else ids[::-1]

    def touch(self, ids: list[int]) -> None:
        if self.kind == "fifo":
            return
        for i in ids if self.kind == "lru" else ids[::-1]:
            if i in self.queue:
                self.queue.remove(i)
                self.queue.append(i)

    def remove(self, i: int) -> None:
        if i in self.queue:
            self.queue.remove(i)

    def evict(self, pinned: set[int]) -> int | None:
        free = [i for i in self.queue if i not in pinned]
        if not free:
            return None
        at = self.queue.index(free[0])
        self.queue = self.queue[at + 1 :] + self.queue[:at]  # the pinned ones in front go to the end
        return free[0]

    def resident(self) -> set[int]:
        return set(self.queue)


class S3FifoModel:
    """Algorithm 1 of the S3-FIFO paper on lists of [id, uses]; the paper knows no pins."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: list[list[int]] = []
        self.main: list[list[int]] = []
        self.ghost: list[int] = []

    def insert(self, ids: list[int]) -> None:
        for i in ids[::-1]:
            if i in self.ghost:
                self.ghost.remove(i)
                self.main.append([i, 0])
            else:
                self.small.append([i, 0])

    def touch(self, ids: list[int]) -> None:
        for item in self.small + self.main:
            item[1] = min(3, item[1] + ids.count(item[0]))

    def remove(self, i: int) -> None:
        self.small = [item for item in self.small if item[0] != i]
        self.main = [item for item in self.main if item[0] != i]
        self.ghost = [g for g in self.ghost if g != i]

    def evict(self, pinned: set[int]) -> int | None:
        assert not pinned
        if len(self.small) >= max(1, self.capacity // 10) or not self.main:
            while self.small:
                i, uses = self.small.pop(0)
                if uses <= 1:
                    self.ghost = [*self.ghost, i][-self.capacity :]
                    return i
                self.main.append([i, 0])
        while self.main:
            i, uses = self.main.pop(0)
            if uses == 0:
                return i
            self.main.append([i, uses - 1])
        return self.small.pop(0)[0] if self.small else None

    def resident(self) -> set[int]:
        return {item[0] for item in self.small + self.main}


batches = st.lists(st.integers(0, 25), min_size=1, max_size=5, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["insert", "touch", "remove"]), batches),
        st.tuples(st.just("evict"), st.lists(st.integers(0, 25), max_size=12, unique=True)),
    ),
    max_size=60,
)


def run(policy: EvictionPolicy, model: Model, history: list[tuple[str, list[int]]], *, with_pins: bool) -> None:
    for what, ids in history:
        if what == "insert":
            fresh = [i for i in ids if i not in model.resident()]
            while len(model.resident()) + len(fresh) > CAPACITY:
                assert policy.evict(always) == name(model.evict(set()) or 0)
            policy.insert(names(fresh))
            model.insert(fresh)
        elif what == "touch":
            policy.touch(names(ids))
            model.touch(ids)
        elif what == "remove":
            policy.remove(name(ids[0]))
            model.remove(ids[0])
        else:
            pinned = set(ids) if with_pins else set()
            victim = policy.evict(lambda d, pinned=pinned: int.from_bytes(d, "big") not in pinned)  # type: ignore[misc]
            expected = model.evict(pinned)
            assert victim == (None if expected is None else name(expected))
        assert set(policy) == set(names(list(model.resident())))
        assert len(policy) == len(model.resident())
    while (expected := model.evict(set())) is not None:
        assert policy.evict(always) == name(expected)
    assert policy.evict(always) is None


@pytest.mark.parametrize("kind", ["lru", "prefix-lru", "fifo"])
@settings(max_examples=50, deadline=None)
@given(history=steps)
def test_queue_policies_agree_with_the_model(kind: str, history: list[tuple[str, list[int]]]) -> None:
    run(POLICIES[kind](CAPACITY), QueueModel(kind), history, with_pins=True)


@settings(max_examples=150, deadline=None)
@given(history=steps)
def test_s3fifo_agrees_with_the_paper(history: list[tuple[str, list[int]]]) -> None:
    run(S3FifoPolicy(CAPACITY), S3FifoModel(CAPACITY), history, with_pins=False)


@pytest.mark.parametrize("kind", POLICIES)
@settings(max_examples=50, deadline=None)
@given(history=steps, pinned=st.sets(st.integers(0, 25)))
def test_a_pinned_block_is_neither_evicted_nor_lost(
    kind: str, history: list[tuple[str, list[int]]], pinned: set[int]
) -> None:
    policy = POLICIES[kind](CAPACITY)
    resident: set[int] = set()
    for what, ids in history:
        if what == "insert":
            fresh = [i for i in ids if i not in resident]
            policy.insert(names(fresh))
            resident |= set(fresh)
        elif what == "touch":
            policy.touch(names(ids))
        elif what == "evict":
            victim = policy.evict(lambda d: int.from_bytes(d, "big") not in pinned)
            assert (victim is None) == (resident <= pinned)
            if victim is not None:
                assert int.from_bytes(victim, "big") not in pinned
                resident.remove(int.from_bytes(victim, "big"))
        assert sorted(policy) == sorted(names(list(resident)))

    left = {policy.evict(always) for _ in range(len(resident))}
    assert left == set(names(list(resident)))


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 8), st.booleans()),  # sequence, blocks, make room first
        min_size=1,
        max_size=40,
    )
)
def test_prefix_lru_never_evicts_a_block_before_its_child(requests: list[tuple[int, int, bool]]) -> None:
    """Requests start at block 0, as a key of tokens does; sequence s has blocks 100 s, 100 s + 1, ..."""
    policy = PrefixLruPolicy()
    resident: set[int] = set()
    for sequence, n_blocks, evict in requests:
        wanted = [100 * sequence + i for i in range(n_blocks)]
        known = [i for i in wanted if i in resident]
        fresh = [i for i in wanted if i not in resident]
        policy.insert(names(fresh))
        policy.touch(names(known))  # after the insert, as the core does: the head ends up newest
        resident |= set(fresh)
        if evict:
            victim = int.from_bytes(policy.evict(always) or b"", "big")
            resident.remove(victim)
            assert victim + 1 not in resident, f"block {victim} left before its child"


def test_plain_lru_beheads_a_prefix() -> None:
    """The law above is not empty: LRU breaks it."""
    policy = LruPolicy()
    policy.insert(names([0, 1, 2]))

    assert policy.evict(always) == name(0)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_request_with_no_later_use_leaves_tail_first(kind: str) -> None:
    policy = POLICIES[kind](100)
    policy.insert(names([0, 1, 2]))
    order = [policy.evict(always) for _ in range(3)]

    assert order == names([0, 1, 2] if kind == "lru" else [2, 1, 0])


@pytest.mark.parametrize("kind", POLICIES)
def test_a_search_among_pinned_blocks_ends_soon(kind: str) -> None:
    policy = POLICIES[kind](32768)  # 64 GiB in blocks of 2 MiB
    blocks = names(range(32768))
    policy.insert(blocks)
    for _ in range(3):
        policy.touch(blocks)

    begin = time.thread_time()  # not the clock on the wall: other processes are none of its business
    assert policy.evict(lambda _: False) is None
    assert time.thread_time() - begin < 0.1


@pytest.mark.parametrize("kind", POLICIES)
def test_a_search_looks_at_each_pinned_block_a_bounded_number_of_times(kind: str) -> None:
    policy = POLICIES[kind](1000)
    blocks = names(range(1000))
    policy.insert(blocks)
    for _ in range(3):
        policy.touch(blocks[:500])
    looked_at: list[bytes] = []

    def pinned(digest: bytes) -> bool:
        looked_at.append(digest)
        return False

    for _ in range(3):
        looked_at.clear()
        assert policy.evict(pinned) is None
        assert set(looked_at) == set(blocks)
        assert len(looked_at) <= 3 * len(blocks)
    assert len(policy) == len(blocks)


@pytest.mark.parametrize("kind", POLICIES)
def test_many_pinned_blocks_are_skipped_once_not_once_per_eviction(kind: str) -> None:
    policy = POLICIES[kind](4000)
    policy.insert(names(range(2000, 4000)))
    policy.insert(names(range(2000)))  # the pinned ones of the second half of the queue are older
    looked_at = 0

    def evictable(digest: bytes) -> bool:
        nonlocal looked_at
        looked_at += 1
        return int.from_bytes(digest, "big") < 2000

    victims = {policy.evict(evictable) for _ in range(2000)}

    assert victims == set(names(range(2000)))
    assert looked_at <= 3 * 4000


@pytest.mark.parametrize("kind", POLICIES)
def test_clear_forgets_every_block(kind: str) -> None:
    policy = POLICIES[kind](10)
    policy.insert(names([1, 2]))
    policy.clear()

    assert list(policy) == []
    assert len(policy) == 0
    assert policy.evict(always) is None


def test_s3fifo_remembers_no_more_than_the_capacity() -> None:
    policy = S3FifoPolicy(8)
    most = 0
    for i in range(1000):
        policy.insert([name(i)])
        if len(policy) > 8:
            assert policy.evict(always) is not None
        most = max(most, policy.ghost_blocks)

    assert most == 8


def test_s3fifo_keeps_what_was_used_twice_and_drops_a_scan() -> None:
    policy = S3FifoPolicy(100)
    hot = names(range(5))
    policy.insert(hot)
    policy.touch(hot)
    policy.touch(hot)
    for i in range(1000, 2000):
        policy.insert([name(i)])
        if len(policy) > 100:
            policy.evict(always)

    assert set(hot) <= set(policy)


def test_s3fifo_takes_a_remembered_block_into_the_main_queue() -> None:
    policy = S3FifoPolicy(20)
    policy.insert([name(0)])
    assert policy.evict(always) == name(0)
    assert policy.ghost_blocks == 1
    policy.insert([name(0)])
    policy.insert(names([1, 2, 3]))

    assert policy.ghost_blocks == 0
    assert [policy.evict(always) for _ in range(2)] == names([3, 2])
    assert name(0) in set(policy)


def test_s3fifo_forgets_a_deleted_block_for_good() -> None:
    policy = S3FifoPolicy(20)
    policy.insert([name(0)])
    policy.evict(always)
    policy.remove(name(0))

    assert policy.ghost_blocks == 0


def test_s3fifo_finds_the_one_block_that_is_not_pinned_however_often_it_was_used() -> None:
    policy = S3FifoPolicy(20)
    blocks = names(range(5))
    policy.insert(blocks)
    for _ in blocks:
        policy.evict(always)
    policy.insert(blocks)  # all remembered: all in the main queue
    for _ in range(3):
        policy.touch([blocks[2]])

    assert policy.evict(lambda digest: digest == blocks[2]) == blocks[2]
    assert sorted(policy) == sorted(set(blocks) - {blocks[2]})
