"""A scheduler is answered at once, from memory or with 'ask again', and never forever."""

from __future__ import annotations

import pytest
from kvstore_vllm.lookups import Lookups

A, B = b"a" * 36, b"b" * 36


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lookups(clock: Clock) -> Lookups:
    return Lookups(ttl_s=30.0, wait_s=1.0, limit=4, clock=clock)


def answer(lookups: Lookups, key: bytes, *, present: bool, guessed: bool = False) -> None:
    lookups.take()
    lookups.answered([key], [present], guessed=[guessed])


def test_a_new_key_is_asked_for_once(lookups: Lookups) -> None:
    assert lookups.find(A, "context") is None
    assert lookups.find(A, "another") is None
    assert lookups.take() == [(A, "context")]
    assert lookups.take() == []
    assert lookups.waiting


@pytest.mark.parametrize("present", [True, False])
def test_an_answer_is_remembered_until_it_is_too_old(lookups: Lookups, clock: Clock, present: bool) -> None:
    lookups.find(A, None)
    answer(lookups, A, present=present)
    assert lookups.find(A, None) is present
    assert not lookups.waiting
    clock.now_s += 29.9
    assert lookups.find(A, None) is present
    clock.now_s += 0.2
    assert lookups.find(A, None) is None
    assert lookups.take() == [(A, None)]


def test_a_guess_is_believed_for_a_second(lookups: Lookups, clock: Clock) -> None:
    lookups.find(A, None)
    answer(lookups, A, present=False, guessed=True)
    assert lookups.find(A, None) is False
    clock.now_s += 1.1
    assert lookups.find(A, None) is None


def test_a_question_that_nobody_answers_is_a_miss_in_the_end(lookups: Lookups, clock: Clock) -> None:
    assert lookups.find(A, None) is None
    clock.now_s += 1.1
    assert lookups.find(A, None) is False
    assert lookups.counters.gave_up == 1
    answer(lookups, A, present=True)
    assert lookups.find(A, None) is True


def test_a_failed_load_is_a_miss_until_the_block_is_stored_again(lookups: Lookups) -> None:
    lookups.find(A, None)
    answer(lookups, A, present=True)
    lookups.failed([A])
    assert lookups.find(A, None) is False
    lookups.stored([A])
    assert lookups.find(A, None) is True


def test_a_failed_load_stays_a_miss_when_nothing_is_remembered(clock: Clock) -> None:
    lookups = Lookups(ttl_s=0.0, wait_s=1.0, clock=clock)
    lookups.find(A, None)
    lookups.failed([A])
    clock.now_s += 20
    assert lookups.find(A, None) is False


def test_a_block_on_its_way_is_asked_for_again(lookups: Lookups) -> None:
    lookups.find(A, None)
    answer(lookups, A, present=False)
    lookups.accepted([A])
    assert lookups.find(A, None) is None
    assert lookups.take() == [(A, None)]


def test_an_answer_that_was_overtaken_by_a_store_is_dropped(lookups: Lookups) -> None:
    lookups.find(A, None)
    lookups.take()
    lookups.stored([A])
    lookups.answered([A], [False], guessed=[False])
    assert lookups.find(A, None) is True


def test_an_answer_that_was_overtaken_by_a_failed_load_is_dropped(lookups: Lookups) -> None:
    lookups.find(A, None)
    lookups.take()
    lookups.failed([A])
    lookups.answered([A], [True], guessed=[False])
    assert lookups.find(A, None) is False


def test_a_removed_block_is_a_miss_at_once(lookups: Lookups) -> None:
    lookups.stored([A])
    assert lookups.known_present(A) is False  # nobody has asked since
    assert lookups.find(A, None) is True
    assert lookups.known_present(A)
    lookups.removed([A])
    assert lookups.find(A, None) is False
    assert not lookups.known_present(A)


def test_memory_is_bounded_and_the_oldest_go_first(lookups: Lookups) -> None:
    keys = [bytes([i]) * 36 for i in range(6)]
    lookups.stored(keys)
    assert lookups.find(keys[5], None) is True
    assert lookups.find(keys[0], None) is None


def test_more_questions_than_fit_are_misses(lookups: Lookups) -> None:
    keys = [bytes([i]) * 36 for i in range(6)]
    assert [lookups.find(key, None) for key in keys] == [None] * 4 + [False] * 2


def test_clear_forgets_answers_and_questions(lookups: Lookups) -> None:
    lookups.stored([A])
    lookups.find(B, None)
    lookups.clear()
    assert not lookups.waiting
    assert lookups.take() == []
    lookups.answered([B], [True], guessed=[False])
    assert lookups.find(A, None) is None
    assert lookups.find(B, None) is None
