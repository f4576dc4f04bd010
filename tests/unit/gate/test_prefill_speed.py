"""What is learned of an engine from its prefills."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.prefill_speed import PrefillSpeed


def learned(*prefills: tuple[int, float]) -> PrefillSpeed:
    speed = PrefillSpeed()
    for tokens, seconds in prefills:
        speed.note(tokens, seconds)
    return speed


def test_a_configured_speed_is_used_and_not_learned_over() -> None:
    speed = PrefillSpeed(2000.0)
    assert speed.seconds(1000) == pytest.approx(0.5)
    for _ in range(8):
        speed.note(1000, 10.0)
    assert speed.seconds(1000) == pytest.approx(0.5)


def test_two_prefills_say_nothing_yet() -> None:
    speed = learned((1000, 1.0), (1000, 1.0))
    assert not speed.known
    assert math.isinf(speed.seconds(1))
    speed.note(1000, 1.0)
    assert speed.known
    assert speed.seconds(500) == pytest.approx(0.5)


def test_the_first_slow_prefill_of_a_process_does_not_count_for_long() -> None:
    assert learned((1000, 30.0), (1000, 1.0), (1000, 1.0)).seconds(1000) == pytest.approx(1.0)


def test_short_tails_do_not_make_an_engine_slow() -> None:
    speed = learned((4000, 2.0), *[(8, 0.05)] * 5, (4000, 2.0))
    assert speed.seconds(4000) == pytest.approx(2.0)


def test_attention_makes_longer_prompts_slower_per_token() -> None:
    def true_s(tokens: int, context: int = 0) -> float:
        return tokens * (1e-4 + 1e-8 * (2 * context + tokens))

    speed = PrefillSpeed()
    for tokens in (2_000, 4_000, 8_000):
        speed.note(tokens, true_s(tokens))
    assert speed.seconds(32_000) == pytest.approx(true_s(32_000))
    assert speed.seconds(1_000, 16_000) == pytest.approx(true_s(1_000, 16_000))


def test_context_says_as_much_as_length() -> None:
    speed = PrefillSpeed()
    for context in (0, 2_000, 8_000):
        speed.note(1_000, 1_000 * (1e-4 + 1e-8 * (2 * context + 1_000)), context)
    assert speed.seconds(1_000, 16_000) == pytest.approx(1_000 * (1e-4 + 1e-8 * 33_000))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(-5, 0) | st.just(100), st.sampled_from([0.0, -1.0, math.inf, math.nan]))
def test_what_makes_no_sense_is_ignored(tokens: int, seconds: float) -> None:
    speed = PrefillSpeed()
    for _ in range(4):
        speed.note(tokens, seconds)
        speed.note(tokens, 1.0 if tokens <= 0 else seconds)
    assert not speed.known


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(1e-5, 1e3)), min_size=3, max_size=20))
def test_more_tokens_never_take_less_time(prefills: list[tuple[int, float]]) -> None:
    speed = learned(*prefills)
    assert 0.0 < speed.seconds(100) <= speed.seconds(200)
    assert speed.seconds(100) <= speed.seconds(100, 5_000)
