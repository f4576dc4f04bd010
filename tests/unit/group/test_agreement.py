"""Every rank gets the same numbers, in bounded time, whatever the others do."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore import BackendError, ConfigError, DeadlineError
from kvstore.group import Agreement, Clock, question
from tests.unit.group.ranks import DEADLINE_S, QUESTION, SLACK_S, all_at_once, ask, groups, join, ranks

Least = Callable[[Sequence[int], float], list[int]]


@pytest.mark.parametrize("size", [2, 4])
def test_the_least_number_is_everybodys(size: int) -> None:
    agreements = ranks(size)

    assert ask(agreements, [[5 + rank, 9 - rank, 7] for rank in range(size)]) == [[5, 10 - size, 7]] * size
    assert ask(agreements, [[rank] for rank in range(size)]) == [[0]] * size
    assert [a.health.state for a in agreements] == ["ok"] * size
    assert [a.counters.agreements for a in agreements] == [3] * size


def test_different_questions_get_nothing_and_the_next_one_is_answered() -> None:
    agreements = ranks(2)

    assert ask(agreements, [[4], [4]], asked=[question("get", [b"a"]), question("get", [b"b"])]) == [[0], [0]]
    assert [(a.counters.mismatches, a.health.state) for a in agreements] == [(1, "degraded")] * 2

    assert ask(agreements, [[4], [3]]) == [[3], [3]]
    assert [a.health.state for a in agreements] == ["ok"] * 2


def test_questions_differ_by_call_blocks_and_their_order() -> None:
    asked = [("get", [b"a", b"b"]), ("get", [b"b", b"a"]), ("get", [b"a"]), ("lookup", [b"a", b"b"]), ("get", [])]

    numbers = {question(call, blocks) for call, blocks in asked}

    assert len(numbers) == len(asked)
    assert all(0 <= number < 1 << 63 for number in numbers)


def test_a_rank_that_does_not_come_costs_the_others_no_more_than_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agreements = ranks(2)

    began = time.monotonic()
    first = ask(agreements[:1], [[4]])
    took_s = time.monotonic() - began
    late = ask(agreements[1:], [[4]])  # comes when the other has given up

    assert (first, late) == ([[0]], [[0]])
    assert took_s < DEADLINE_S + SLACK_S
    assert [a.broken for a in agreements] == [True, True]
    assert [a.counters.failures for a in agreements] == [1, 1]
    assert "waited in vain" in agreements[0].health.detail
    warnings = [r for r in caplog.records if r.name == "kvstore.group" and r.levelno == logging.WARNING]
    assert len(warnings) == 2, "one for each rank"


def test_a_broken_group_answers_nothing_at_once_and_for_good(caplog: pytest.LogCaptureFixture) -> None:
    agreements = ranks(2)
    agreements[1].close()
    assert ask(agreements[:1], [[4]]) == [[0]]
    caplog.clear()

    began = time.monotonic()
    answers = [ask(agreements, [[4], [4]]) for _ in range(20)]

    assert answers == [[[0], [0]]] * 20
    assert time.monotonic() - began < DEADLINE_S
    assert caplog.records == []


def test_a_rank_that_is_gone_is_noticed_at_once() -> None:
    agreements = ranks(4)
    agreements[2].close()
    others = [a for a in agreements if a.rank != 2]

    began = time.monotonic()

    assert ask(others, [[4]] * 3) == [[0]] * 3
    assert time.monotonic() - began < DEADLINE_S + SLACK_S


class Stumbling:
    """Stands for :meth:`Agreement._least` of one rank and misbehaves in one round."""

    def __init__(self, agreement: Agreement, round_number: int, *, pause_s: float = 0.0, fail: str = "") -> None:
        self._rounds = itertools.count()
        self._least: Least = agreement._least
        self._at = round_number
        self._pause_s = pause_s
        self._fail = fail
        agreement._least = self  # type: ignore[method-assign]

    def __call__(self, values: Sequence[int], until: float) -> list[int]:
        if next(self._rounds) != self._at:
            return self._least(values, until)
        if self._fail == "before":
            time.sleep(self._pause_s)
            raise RuntimeError("failed before it told the others")
        if self._fail == "after":
            self._least(values, until)
            time.sleep(self._pause_s)
            raise RuntimeError("failed after it told the others")
        time.sleep(self._pause_s)
        return self._least(values, until)


def test_a_rank_that_stands_still_before_it_confirms_takes_what_the_others_settled() -> None:
    agreements = ranks(2)
    Stumbling(agreements[1], 1, pause_s=DEADLINE_S * 1.5)

    assert ask(agreements, [[4], [6]]) == [[4], [4]], "both know it, and the first to give up wrote it down"
    assert ask(agreements, [[4], [6]]) == [[0], [0]]


def test_a_rank_that_lost_the_others_number_settles_on_nothing_for_all() -> None:
    agreements = ranks(2)
    Stumbling(agreements[1], 0, fail="after")

    assert ask(agreements, [[4], [6]]) == [[0], [0]]


def test_a_rank_that_looks_late_finds_what_the_others_confirmed_in_vain() -> None:
    agreements = ranks(2)
    Stumbling(agreements[1], 0, fail="after", pause_s=DEADLINE_S * 1.2)

    assert ask(agreements, [[4], [6]]) == [[4], [4]], "it had given its own number, so it has the blocks"


@pytest.mark.parametrize("seed", range(6))
def test_no_two_ranks_ever_answer_differently(seed: int) -> None:
    """Ranks fail before, in or after either round, and stand still for up to a deadline and a half."""
    rng = random.Random(seed)
    agreements = ranks(4)
    for agreement in rng.sample(agreements, rng.randint(1, 3)):
        pause_s = rng.choice([0.0, 0.1, 0.3, 0.6])
        Stumbling(agreement, rng.randint(0, 3), pause_s=pause_s, fail=rng.choice(["", "before", "after"]))

    for _ in range(3):
        values = [[rng.randint(1, 9), rng.randint(0, 9)] for _ in agreements]
        answers = ask(agreements, values, deadline_s=0.4)

        assert answers in ([[min(v[0] for v in values), min(v[1] for v in values)]] * 4, [[0, 0]] * 4)


class Silent:
    """A store that hangs."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.end = threading.Event()

    def compare_set(self, *_: str) -> bytes:
        self.asked.set()
        self.end.wait(30)
        raise RuntimeError("gone")


def test_a_store_that_hangs_holds_nobody_up() -> None:
    agreements = ranks(2)
    silent = Silent()
    agreements[0]._store = silent  # type: ignore[assignment]

    began = time.monotonic()

    assert ask(agreements[:1], [[4]]) == [[0]]
    assert time.monotonic() - began < DEADLINE_S + SLACK_S
    assert silent.asked.is_set()
    silent.end.set()


def test_a_second_thread_of_a_rank_waits_its_turn_no_longer_than_its_deadline() -> None:
    agreements = ranks(2)

    def first() -> list[int]:
        return agreements[0].agree(QUESTION, [4], Clock.start(3.0))

    def second() -> list[int]:
        return agreements[0].agree(QUESTION, [4], Clock.start(0.3))

    assert all_at_once([first, second]) == [[0], [0]]
    assert agreements[0].broken


def test_an_interrupted_question_breaks_the_group() -> None:
    agreements = ranks(2)

    def interrupted(*_: Any) -> list[int]:
        raise KeyboardInterrupt

    agreements[0]._least = interrupted  # type: ignore[assignment,method-assign]

    with pytest.raises(KeyboardInterrupt):
        agreements[0].agree(QUESTION, [4], Clock.start(1.0))
    assert ask(agreements, [[4], [4]]) == [[0], [0]]


# -- opening


def test_a_group_of_one_needs_no_agreement() -> None:
    assert Agreement.join(groups(1)[0]) is None


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group is 'tp'; expected a torch\.distributed ProcessGroup"):
        Agreement.join("tp")  # type: ignore[arg-type]


def test_a_group_can_be_joined_again() -> None:
    there = groups(2)
    for _ in range(3):
        agreements = join(there)
        assert ask(agreements, [[3], [2]]) == [[2], [2]]
        for agreement in agreements:
            agreement.close()


def test_all_ranks_open_or_none_does() -> None:
    agreements = join(groups(3))

    def open_one(agreement: Agreement) -> str:
        def make() -> str:
            if agreement.rank == 1:
                raise ConfigError("no such directory")
            return "made"

        try:
            return agreement.together("same", 8, make)
        except (ConfigError, BackendError) as e:
            return f"{type(e).__name__}: {e}"

    told = all_at_once([lambda a=a: open_one(a) for a in agreements])  # type: ignore[misc]

    other = "BackendUnavailableError: another rank of the group could not open its cache; its own error says why"
    assert told == [other, "ConfigError: no such directory", other]


def test_caches_that_do_not_belong_together_are_refused() -> None:
    agreements = join(groups(2))

    def open_one(agreement: Agreement) -> str:
        try:
            return agreement.together(f"revision {agreement.rank}", 8, lambda: "made")
        except ConfigError as e:
            return str(e)

    told = all_at_once([lambda a=a: open_one(a) for a in agreements])  # type: ignore[misc]

    assert [f"rank {rank} opened revision {rank}" in message for rank, message in enumerate(told)] == [True, True]


def test_a_rank_that_never_opens_is_named_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.group._OPEN_S", 0.5)

    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"rank 0 could not be connected with the other ranks .*GLOO_SOCKET"):
        Agreement.join(groups(2)[0])
    with pytest.raises(DeadlineError, match="the 2 ranks of the group did not all open their caches"):
        join(groups(2))[0].together("same", 8, lambda: "made")
    assert time.monotonic() - began < 2 * (0.5 + SLACK_S)


def test_the_smallest_chunk_is_everybodys() -> None:
    agreements = join(groups(2))

    all_at_once([lambda a=a: a.together("same", 8 + a.rank, lambda: "made") for a in agreements])  # type: ignore[misc]

    assert [a.chunk_blocks for a in agreements] == [8, 8]
