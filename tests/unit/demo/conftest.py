from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.cli.demo.facts import Answer, Computed, Outcome, Restored, Setup, Stored

SETUP = Setup(import_s=3.0, load_s=2.0, fingerprint_s=0.05, open_s=0.01, warmup_s=0.5)


def answer(restored_tokens: int, ttft_s: float, token_ids: list[int]) -> Answer:
    return Answer(
        question="Who <is> it?",
        text="It & she.",
        token_ids=token_ids,
        prompt_tokens=2000,
        restored_tokens=restored_tokens,
        ttft_s=ttft_s,
        restore_s=0.1,
        inject_s=0.01,
        compute_s=ttft_s - 0.11,
    )


@pytest.fixture
def outcome() -> Outcome:
    """A demo in which everything held: 10.0 s computed, 0.5 s restored."""
    stored = Stored(124, 16, 45_711_360, 31_000_000, "planes", "/somewhere/demo-store", 0.4)
    computed = Computed(10, {"model": "m", "dtype": "bfloat16"}, SETUP, answer(0, 11.0, [1, 2]), stored, "ab" * 32)
    restored = Restored(
        pid=11,
        setup=replace(SETUP, load_s=1.5),
        answers=[answer(1984, 0.5, [1, 2]), answer(1968, 0.8, [3])],
        ttfts_s=[0.5, 0.3, 0.4],
        recomputed=answer(0, 10.0, [1, 2]),
        kv_sha256="ab" * 32,
        recomputed_kv_sha256="ab" * 32,
        reference_token_ids=[3],
    )
    return Outcome(computed, restored, min_ratio=10.0)
