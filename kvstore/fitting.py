"""Straight lines through a few measurements, of which some may be far off."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Final

_SPREAD: Final = 2.0
"""Two points tell a slope when one is at least so many times as far out as the other: nearer together, the
noise of the measurements is larger than what lies between them."""

Point = tuple[float, float]


def straight_line(points: Sequence[Point]) -> tuple[float, float] | None:
    """Fit ``y = intercept + slope * x``, neither of them negative.

    The slope is the median of the slopes between points (Theil, "A rank-invariant method of linear and
    polynomial regression analysis", 1950; Sen, JASA 63, 1968), the intercept the median of what is left.
    Of many points, 29 % may be anything without harm (Rousseeuw and Leroy, 1987, chapter 2.7).

    Args:
        points: Pairs of x above 0 and y.

    Returns:
        Intercept and slope; None when the points lie too close together to tell.
    """
    slopes = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
        if max(x1, x2) >= _SPREAD * min(x1, x2)
    ]
    if not slopes:
        return None
    slope = max(0.0, median(slopes))
    intercept = median(y - slope * x for x, y in points)
    if intercept < 0.0:  # through the origin then
        return 0.0, median(y / x for x, y in points)
    return intercept, slope
