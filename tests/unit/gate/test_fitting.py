"""Straight lines through measurements of which some are far off."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.fitting import straight_line

seconds = st.floats(1e-6, 100.0)
sizes = st.lists(st.integers(1, 10_000), min_size=2, max_size=12).filter(lambda ns: max(ns) >= 2 * min(ns))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes, seconds, seconds)
def test_points_on_a_line_give_the_line(xs: list[int], intercept: float, slope: float) -> None:
    fitted = straight_line([(x, intercept + slope * x) for x in xs])
    assert fitted is not None
    for x in xs:
        assert fitted[0] + fitted[1] * x == pytest.approx(intercept + slope * x, rel=1e-6)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 10_000), seconds), min_size=1, max_size=12))
def test_no_points_give_a_negative_time(points: list[tuple[int, float]]) -> None:
    fitted = straight_line(points)
    assert fitted is None or (fitted[0] >= 0.0 and fitted[1] >= 0.0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 6), st.floats(0.0, 1e6))
def test_one_wild_point_of_seven_does_no_harm(which: int, wild: float) -> None:
    points = [(float(x), 1.0 + 0.5 * x) for x in (1, 3, 9, 27, 81, 243, 729)]
    points[which] = (points[which][0], wild)
    fitted = straight_line(points)
    assert fitted is not None
    assert fitted == pytest.approx((1.0, 0.5), rel=1e-6)


@pytest.mark.parametrize("xs", [[5], [5, 5, 5], [10, 19, 15]])
def test_points_close_together_tell_no_slope(xs: list[float]) -> None:
    assert straight_line([(x, 2.0) for x in xs]) is None


def test_more_that_takes_less_is_taken_as_all_the_same() -> None:
    assert straight_line([(1.0, 3.0), (10.0, 2.0), (100.0, 1.0)]) == (2.0, 0.0)
