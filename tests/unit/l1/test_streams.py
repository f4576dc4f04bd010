"""Staging buffers of a lane are reused, but only when nothing needs them any more."""

from __future__ import annotations

import pytest
import torch

from kvstore.l1 import streams
from kvstore.l1.streams import InlineLane, Mark, Stage, lane_of

HOST = torch.device("cpu")


class _Pending(Mark):
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> InlineLane:
    monkeypatch.setattr(streams, "STAGE_BYTES", 4096)
    return InlineLane(HOST)


def returned(lane: InlineLane, n_stages: int, *, free: Mark | None = None) -> list[Stage]:
    stages = [lane.borrow(100) for _ in range(n_stages)]
    for stage in stages:
        stage.free = free
        lane.give_back(stage)
    return stages


def test_a_stage_holds_what_was_asked_for(lane: InlineLane) -> None:
    for nbytes, size in ((1, 4096), (4096, 4096), (5000, 5000)):
        stage = lane.borrow(nbytes)
        assert stage.near.numel() == stage.host.numel() == size


def test_a_free_stage_is_used_again(lane: InlineLane) -> None:
    (stage,) = returned(lane, 1)
    assert lane.borrow(100) is stage
    assert lane.borrow(100) is not stage


def test_a_busy_stage_is_left_alone_while_there_are_few(lane: InlineLane) -> None:
    busy = returned(lane, 2, free=_Pending())
    assert lane.borrow(100) not in busy


def test_the_oldest_busy_stage_is_taken_when_there_are_many(lane: InlineLane) -> None:
    busy = returned(lane, 5, free=_Pending())
    assert lane.borrow(100) is busy[0]


def test_stages_too_small_make_room(lane: InlineLane) -> None:
    small = returned(lane, 3)
    large = lane.borrow(8000)
    lane.give_back(large)
    assert lane.borrow(8000) is large
    assert lane.borrow(100) in small


def test_host_memory_has_no_lane_and_unknown_devices_a_plain_one() -> None:
    assert lane_of(HOST) is None
    assert isinstance(lane_of(torch.device("meta")), InlineLane)
