"""The suite that proves an L1 eviction policy right."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable
from typing import ClassVar, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.eviction import EvictionPolicy
from kvstore.plugins import Registry
from kvstore.testing.deviations import Suite

_STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "remove", "evict", "evict pinned"]),
        st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    ),
    max_size=60,
)


def digest(i: int) -> bytes:
    """A digest."""
    return i.to_bytes(32, "big")


def digests(ids: Iterable[int]) -> list[bytes]:
    """Several digests."""
    return [digest(i) for i in ids]


def always(_: bytes) -> bool:
    """Every block may go."""
    return True


class PolicyConformance(Suite):
    """Every law of :class:`kvstore.eviction.EvictionPolicy`, for the policy plugin named ``plugin``.

    Attributes:
        plugin: Plugin name, as in ``policy = "..."``.
        capacity_blocks: Blocks of the L1 it is made for.
        examples: Random sequences that are compared with a set.
    """

    plugin: ClassVar[str]
    capacity_blocks: ClassVar[int] = 40
    examples: ClassVar[int] = 100

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        """A policy; override it for one that is not installed."""
        return self.make()

    def make(self) -> EvictionPolicy:
        """Make one policy."""
        return Registry.discover().create_policy(self.plugin, self.capacity_blocks)

    def test_a_new_policy_knows_nothing(self, policy: EvictionPolicy) -> None:
        assert len(policy) == 0
        assert list(policy) == []
        assert policy.evict(always) is None

    def test_what_was_inserted_is_resident(self, policy: EvictionPolicy) -> None:
        policy.insert(digests(range(5)))
        policy.insert(digests(range(5, 8)))
        policy.insert([])
        assert len(policy) == 8
        assert sorted(policy) == digests(range(8))

    def test_everything_is_evicted_once_and_then_nothing(self, policy: EvictionPolicy) -> None:
        policy.insert(digests(range(20)))
        policy.touch(digests(range(0, 20, 3)))
        evicted = [policy.evict(always) for _ in range(20)]
        assert sorted(d for d in evicted if d is not None) == digests(range(20))
        assert policy.evict(always) is None
        assert len(policy) == 0

    def test_a_victim_is_forgotten(self, policy: EvictionPolicy) -> None:
        policy.insert(digests(range(6)))
        victim = policy.evict(always)
        assert victim is not None
        assert victim not in set(policy)
        assert len(policy) == 5
        policy.insert([victim])
        assert sorted(policy) == digests(range(6))

    @pytest.mark.parametrize("free", [0, 3, 9])
    def test_pinned_blocks_are_never_victims(self, policy: EvictionPolicy, free: int) -> None:
        policy.insert(digests(range(10)))
        for _ in range(3):
            policy.touch(digests(range(10)))
        assert policy.evict(lambda d: d == digest(free)) == digest(free)
        assert policy.evict(lambda d: d == digest(free)) is None
        assert sorted(policy) == digests(i for i in range(10) if i != free)

    def test_a_search_among_pinned_blocks_is_bounded(self, policy: EvictionPolicy) -> None:
        policy.insert(digests(range(self.capacity_blocks)))
        for _ in range(4):
            policy.touch(digests(range(self.capacity_blocks)))
        asked = 0

        def pinned(_: bytes) -> bool:
            nonlocal asked
            asked += 1
            return False

        assert policy.evict(pinned) is None
        assert asked <= 8 * self.capacity_blocks
        assert sorted(policy) == digests(range(self.capacity_blocks))

    def test_a_removed_block_is_forgotten(self, policy: EvictionPolicy) -> None:
        policy.insert(digests(range(4)))
        policy.remove(digest(1))
        policy.remove(digest(1))
        policy.remove(digest(99))
        assert sorted(policy) == digests([0, 2, 3])
        assert {policy.evict(always) for _ in range(3)} == set(digests([0, 2, 3]))

    def test_uses_of_unknown_blocks_are_ignored(self, policy: EvictionPolicy) -> None:
        policy.insert(digests(range(3)))
        policy.touch(digests([7, 1, 8]))
        assert sorted(policy) == digests(range(3))

    def test_a_block_inserted_twice_is_one_block(self, policy: EvictionPolicy) -> None:
        policy.insert(digests(range(4)))
        policy.insert(digests(range(2, 6)))
        assert len(policy) == 6
        assert sorted(policy) == digests(range(6))

    def test_clear_forgets_everything(self, policy: EvictionPolicy) -> None:
        policy.insert(digests(range(9)))
        policy.touch(digests(range(9)))
        policy.clear()
        assert len(policy) == 0
        assert policy.evict(always) is None
        policy.insert(digests([3]))
        assert list(policy) == [digest(3)]

    def test_blocks_that_left_take_no_memory_for_long(self, policy: EvictionPolicy) -> None:
        def churn(start: int, count: int) -> None:
            for i in range(start, start + count):
                policy.insert([digest(i)])
                if len(policy) > self.capacity_blocks:
                    assert policy.evict(always) is not None

        churn(0, 2000)
        gc.collect()
        tracemalloc.start()
        try:
            churn(2000, 6000)
            gc.collect()
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown < 1000 * self.capacity_blocks, f"{grown} bytes more after 6000 blocks came and went"

    def test_random_sequences_agree_with_a_set(self) -> None:
        @settings(max_examples=self.examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(steps=_STEPS)
        def run(steps: list[tuple[str, list[int]]]) -> None:
            policy, model = self.make(), set[int]()
            for what, ids in steps:
                match what:
                    case "insert":
                        policy.insert(digests(ids))
                        model.update(ids)
                    case "touch":
                        policy.touch(digests(ids))
                    case "remove":
                        policy.remove(digest(ids[0]))
                        model.discard(ids[0])
                    case _:
                        free = model & set(ids) if what == "evict pinned" else model
                        victim = policy.evict(lambda d, free=free: int.from_bytes(d, "big") in free)  # type: ignore[misc]
                        assert (victim is not None) is bool(free)
                        if victim is not None:
                            assert int.from_bytes(victim, "big") in free
                            model.discard(int.from_bytes(victim, "big"))
                assert len(policy) == len(model)
                assert sorted(policy) == digests(sorted(model))

        run()
