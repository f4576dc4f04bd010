"""Ranks in processes of their own: one store, one answer, and the same heads under another size."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stateful.media import BUCKET, Place
from tests.stateful.rank import DEADLINE_S, HEADS, Rank, all_ask, form
from tests.support_s3 import make_bucket, moto_url

__all__ = ["moto_url"]

N = 6
SLACK_S = 4.0  # of a busy machine
LOCAL = ("lmdb", "segments")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, moto_url: str) -> Place:
    make_bucket(moto_url, BUCKET)
    return Place(tmp_path_factory.mktemp("tp"), moto_url)


@pytest.fixture(scope="module")
def four() -> Iterator[list[Rank]]:
    with Rank() as a, Rank() as b, Rank() as c, Rank() as d:
        yield [a, b, c, d]


def ranges(size: int) -> list[list[int]]:
    """The heads of each rank."""
    each = HEADS // size
    return [[rank * each, (rank + 1) * each] for rank in range(size)]


def tier_of(place: Place, medium: str, request: pytest.FixtureRequest, **core: Any) -> dict[str, Any]:
    return place.tier(medium, request.node.name.replace("[", "-").strip("]"), capacity="64MiB", **core)


@pytest.mark.parametrize("medium", [*LOCAL, "s3"])
def test_two_ranks_share_a_store_and_an_answer(
    place: Place, four: list[Rank], medium: str, request: pytest.FixtureRequest
) -> None:
    ranks = four[:2]
    form(ranks)
    tier = tier_of(place, medium, request)

    assert all_ask(ranks, "open", tier=tier, l1=False) == ["ok", "ok"]
    assert all_ask(ranks, "put", seed=1, blocks=N) == [N, N]
    assert all_ask(ranks, "get", seed=1, blocks=N) == [N, N], "each reads its own heads back"
    assert ranks[1].ask("delete", seed=1, blocks=N, at=4) == 1
    assert all_ask(ranks, "open", tier=tier) == ["ok", "ok"], "what a process remembered is gone"
    assert all_ask(ranks, "get", seed=1, blocks=N) == [4, 4]
    assert all_ask(ranks, "lookup", seed=1, blocks=N) == [4, 4]
    gone = (4, 5) if medium == "s3" else (4,)  # a pack is deleted as a whole
    assert all_ask(ranks, "each", seed=1, blocks=N) == [["absent" if i in gone else "delivered" for i in range(N)]] * 2
    assert all_ask(ranks, "state") == [["ok", 0, 0]] * 2


def test_four_ranks_agree(place: Place, four: list[Rank], request: pytest.FixtureRequest) -> None:
    form(four)
    assert all_ask(four, "open", tier=tier_of(place, "lmdb", request)) == ["ok"] * 4
    assert all_ask(four, "put", seed=1, blocks=N) == [N] * 4
    four[2].ask("delete", seed=1, blocks=N, at=3)

    assert all_ask(four, "get", seed=1, blocks=N) == [3] * 4
    assert all_ask(four, "state") == [["ok", 0, 0]] * 4


def test_a_rank_that_dies_costs_the_others_their_hits_and_nothing_else(
    place: Place, request: pytest.FixtureRequest, four: list[Rank]
) -> None:
    victim = Rank()
    ranks = [*four[:3], victim]
    try:
        form(ranks)
        assert all_ask(ranks, "open", tier=tier_of(place, "lmdb", request)) == ["ok"] * 4
        all_ask(ranks, "put", seed=1, blocks=N)
        assert all_ask(ranks, "get", seed=1, blocks=N) == [N] * 4
    finally:
        victim.process.kill()
        victim.process.communicate(timeout=20)

    answers = all_ask(ranks[:3], "timed_get", seed=1, blocks=N)

    assert [n for n, _ in answers] == [0, 0, 0]
    assert max(took_s for _, took_s in answers) < DEADLINE_S + SLACK_S
    assert [state[:2] for state in all_ask(ranks[:3], "state")] == [["down", 1]] * 3
    assert all_ask(ranks[:3], "put", seed=2, blocks=N) == [N] * 3, "what is computed is still stored"


def test_a_rank_that_stands_still_gets_the_same_miss_when_it_wakes(
    place: Place, request: pytest.FixtureRequest, four: list[Rank]
) -> None:
    ranks = four[:2]
    form(ranks)
    assert all_ask(ranks, "open", tier=tier_of(place, "lmdb", request)) == ["ok", "ok"]
    all_ask(ranks, "put", seed=1, blocks=N)
    assert all_ask(ranks, "get", seed=1, blocks=N) == [N, N]

    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    try:
        ranks[1].tell("get", seed=1, blocks=N)
        n, took_s = ranks[0].ask("timed_get", seed=1, blocks=N)
    finally:
        os.kill(ranks[1].process.pid, signal.SIGCONT)

    assert (n, ranks[1].answer()) == (0, 0)
    assert took_s < DEADLINE_S + SLACK_S
    assert [state[0] for state in all_ask(ranks, "state")] == ["down", "down"]
    assert all_ask(ranks, "open", tier=tier_of(place, "lmdb", request)) == ["ok", "ok"], "opening again mends it"
    assert all_ask(ranks, "get", seed=1, blocks=N) == [N, N]


@pytest.mark.parametrize(("written", "read"), [(2, 1), (1, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("medium", LOCAL)
def test_heads_written_under_one_size_are_read_under_another(
    place: Place, four: list[Rank], medium: str, written: int, read: int, request: pytest.FixtureRequest
) -> None:
    """Bit for bit, each rank its own heads; where one stored part is missing, the block is."""
    tier = tier_of(place, medium, request)
    writers, readers = four[:written], four[:read]
    form(writers)
    all_ask(writers, "open", tier=tier)
    assert all_ask(writers, "put", seed=3, blocks=N) == [N] * written
    writers[-1].ask("delete", seed=3, blocks=N, at=5)
    all_ask(writers, "close")

    form(readers)
    stored = [[r for r in ranges(written) if own[0] <= r[0] < own[1] or r[0] <= own[0] < r[1]] for own in ranges(read)]
    assert all_ask(readers, "open", tier=tier, stored=stored) == ["ok"] * read

    assert all_ask(readers, "lookup", seed=3, blocks=N) == [5] * read
    assert all_ask(readers, "get", seed=3, blocks=N) == [5] * read
    assert all_ask(readers, "each", seed=3, blocks=N) == [["delivered"] * 5 + ["absent"]] * read


def test_what_is_put_in_parts_is_found_by_the_ranks_that_hold_them(
    place: Place, four: list[Rank], request: pytest.FixtureRequest
) -> None:
    tier = tier_of(place, "lmdb", request)
    form(four[:1])
    assert four[0].ask("open", tier=tier, stored=[ranges(2)]) == "ok"
    assert four[0].ask("put", seed=4, blocks=N) == N
    assert four[0].ask("get", seed=4, blocks=N) == N

    form(four[:2])
    all_ask(four[:2], "open", tier=tier)
    assert all_ask(four[:2], "get", seed=4, blocks=N) == [N, N]
