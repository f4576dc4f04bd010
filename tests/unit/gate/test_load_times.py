"""What is learned of a tier from its reads."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.l2.load_times import LoadTime, LoadTimes, load_time

reads = st.lists(st.tuples(st.integers(1, 5_000), st.floats(1e-6, 60.0)), min_size=1, max_size=8)


class Clock:
    """Seconds that pass when a test says so: one for each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def learned(*reads: tuple[int, float]) -> LoadTimes:
    times = LoadTimes(Clock())
    for n_blocks, seconds in reads:
        times.note(n_blocks, seconds)
    return times


def seconds(times: LoadTimes, n_blocks: int) -> float:
    assert times.known is not None
    return times.known.seconds(n_blocks)


def test_reads_of_several_sizes_tell_latency_from_time_per_block() -> None:
    times = learned((1, 0.011), (10, 0.020), (50, 0.060), (100, 0.110))
    assert times.known is not None
    assert times.known.latency_s == pytest.approx(0.010)
    assert times.known.block_s == pytest.approx(0.001)
    assert times.known.bytes_per_s(1 << 20) == pytest.approx((1 << 20) * 1000)


def test_three_reads_say_nothing_yet() -> None:
    times = learned((1, 0.1), (10, 0.1), (100, 0.1))
    assert times.known is None
    times.note(1, 0.1)
    assert times.known is not None


def test_of_sizes_that_nobody_read_the_best_is_assumed() -> None:
    times = learned(*[(10, 0.5)] * 4)
    assert seconds(times, 10) == pytest.approx(0.5)
    assert seconds(times, 1) == pytest.approx(0.05)
    assert seconds(times, 1000) == pytest.approx(0.5)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reads, st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_block_of_a_longer_read_costs_no_more(some: list[tuple[int, float]], a: int, b: int) -> None:
    # what lookup and get rely on: whoever may load part of a run may load all of it
    fewer, more = sorted((a, b))
    fitted = load_time(some)
    assert fitted.seconds(more) / more <= fitted.seconds(fewer) / fewer * (1 + 1e-9)
    assert fitted.seconds(more) >= fitted.seconds(fewer)


@pytest.mark.parametrize("n_blocks", [1, 64])
def test_one_read_that_took_a_minute_changes_little(n_blocks: int) -> None:
    times = learned(*[(64, 0.064 + 0.01), (1, 0.01)] * 4)
    before = seconds(times, 64)
    times.note(n_blocks, 60.0)
    assert seconds(times, 64) == pytest.approx(before, rel=0.2)


def test_five_slow_reads_are_believed_and_five_fast_ones_again() -> None:
    times = learned(*[(64, 0.01)] * 8)
    for _ in range(5):
        times.note(64, 1.0)
    assert seconds(times, 64) == pytest.approx(1.0)
    for _ in range(5):
        times.note(64, 0.01)
    assert seconds(times, 64) == pytest.approx(0.01)


@pytest.mark.parametrize(("factor", "same"), [(1.1, True), (0.9, True), (1.2, False), (0.8, False)])
def test_noise_of_an_eighth_changes_nothing(factor: float, same: bool) -> None:
    times = learned(*[(64, 1.0)] * 8)
    before = times.known
    for _ in range(8):
        times.note(64, factor)
    assert (times.known is before) is same


def test_learning_to_tell_latency_from_bandwidth_counts_as_news() -> None:
    times = learned(*[(64, 1.0)] * 4)
    for _ in range(2):
        times.note(1, 1.0)  # all of it was latency
    assert times.known == LoadTime(1.0, 0.0)
    assert times.known.bytes_per_s(100) == 0.0


def test_it_is_fitted_100_times_a_second_at_most() -> None:
    now = 0.0
    times = LoadTimes(lambda: now)
    for _ in range(4):
        times.note(1, 1.0)
    assert seconds(times, 1) == 1.0
    for _ in range(8):
        times.note(1, 2.0)
    assert seconds(times, 1) == 1.0
    now = 0.011
    assert seconds(times, 1) == 2.0


def test_the_largest_of_the_newest_reads_is_known() -> None:
    times = learned()
    assert times.largest_blocks == 0
    times.note(100, 1.0)
    assert times.largest_blocks == 100
    for _ in range(8):
        times.note(7, 1.0)
    assert times.largest_blocks == 7
