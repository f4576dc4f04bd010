"""The laws of all targets under hypothesis, over their seeds and corpus, and over what was once found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import CORPUS, TARGETS

MAX_FILES = 200
MAX_BYTES = 1 << 20
QUIET = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_corpus_hold_the_law(name: str) -> None:
    target = TARGETS[name]
    inputs = target.inputs()
    assert len(inputs) >= 1
    for data in inputs:
        target(data)


@pytest.mark.parametrize("name", TARGETS)
@QUIET
@given(rng=st.randoms(use_true_random=False), start=st.integers(0, 100), rounds=st.integers(1, 3))
def test_damage_that_gets_past_the_first_checks_holds_the_law(
    name: str, rng: random.Random, start: int, rounds: int
) -> None:
    target = TARGETS[name]
    inputs = target.inputs()
    data = inputs[start % len(inputs)]
    for _ in range(rounds):
        data = target.mutate(rng, data)
    target(data)


@pytest.mark.parametrize("name", TARGETS)
@QUIET
@given(data=st.binary(max_size=400))
def test_any_bytes_hold_the_law(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_hundreds_of_damaged_inputs_hold_the_law(name: str) -> None:
    target, rng = TARGETS[name], random.Random(7)
    inputs = target.inputs()
    for _ in range(300 if name not in {"lmdb-file", "config"} else 60):
        target(target.mutate(rng, rng.choice(inputs)))


def test_the_corpus_is_small_and_belongs_to_targets() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent for path in files} <= {CORPUS / name for name in TARGETS}
    assert len(files) < MAX_FILES
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


def test_no_artefact_of_a_crash_lies_around() -> None:
    artefacts = Path(__file__).parent / "artefacts"
    assert not artefacts.exists() or not list(artefacts.iterdir())
