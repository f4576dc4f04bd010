"""Random sequences of legal calls: both libraries give the same statuses, numbers, shapes and bytes.

What legal means is told in ``script``.  What AIBrix gets wrong beyond that is demonstrated one by
one in ``test_differences``; nothing is filtered out where answers are compared.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engines.aibrix.pair import BLOCK_TOKENS, KINDS, MakePair, Pair, Side, library
from tests.engines.aibrix.script import CALLS, N_BLOCKS, PROMPTS, Run, Script, hashes_of, runs

pytest.importorskip("aibrix_kvcache", reason="aibrix-kvcache is not installed: make test-engines")
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

WEIGHTED = ["put"] * 5 + ["acquire"] * 4 + ["exists"] * 3 + ["get"] * 3 + list(CALLS)

steps = st.lists(st.tuples(st.sampled_from(WEIGHTED), runs(), st.integers(0, 11)), min_size=4, max_size=24)
quick = settings(
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)


def empty(pair: Pair, kind: str) -> None:
    """Delete what the last example stored."""
    for prompt in PROMPTS:
        for side in pair.sides:
            values: list[Any] = prompt if kind == "tokens" else hashes_of(prompt)
            assert side.cache.delete(None, side.ids(kind, values)).is_ok()


def play(pair: Pair, kind: str, script: list[tuple[str, Run, int]]) -> None:
    playing = Script(pair, kind)
    try:
        for name, run, number in script:
            CALLS[name](playing, run, number)
    finally:
        playing.end()
        empty(pair, kind)


@pytest.mark.parametrize("layout", ["NCLD", "LCND"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_memory(make_pair: MakePair, kind: str, layout: str) -> None:
    pair = make_pair(layout=layout)
    assert {
        type(side.ids(kind, PROMPTS[0] if kind == "tokens" else hashes_of(PROMPTS[0]))).__name__ for side in pair.sides
    } == {"TokenListView" if kind == "tokens" else "BlockHashes"}

    @settings(quick, max_examples=80)
    @given(steps)
    def law(script: list[tuple[str, Run, int]]) -> None:
        play(pair, kind, script)

    law()


@pytest.mark.parametrize("l1", ["1", "0"])
@pytest.mark.parametrize("backend", ["ROCKSDB", "SHFS"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_second_tier(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, backend: str, l1: str
) -> None:
    """The same, and at the end of each sequence both are opened anew and say what they still have."""
    for name, value in {"L2_CACHE_BACKEND": backend, "L1_CACHE_ENABLED": l1, "DOUBLE_GET_THRESHOLD": "1,0"}.items():
        monkeypatch.setenv(f"AIBRIX_KV_CACHE_OL_{name}", value)
    examples = itertools.count()

    @settings(quick, max_examples=8)
    @given(steps, st.lists(runs(), min_size=3, max_size=6))
    def law(script: list[tuple[str, Run, int]], questions: list[Run]) -> None:
        monkeypatch.setenv(f"AIBRIX_KV_CACHE_OL_{backend}_ROOT", str(tmp_path / str(next(examples))))
        pair = make_pair()
        playing = Script(pair, kind, roomy=False, gets=l1 == "0", holes=backend != "SHFS")
        try:
            for name, run, number in script:
                CALLS[name](playing, run, number)
            playing.end()
            for side in pair.sides:
                side.reopen()
            for run in questions:
                playing.exists(run, 0)
                playing.get(run, N_BLOCKS)
                playing.acquire(run, 1)
        finally:
            playing.end()
            for side in pair.sides:
                side.close()

    law()


def parts(side: Side, kind: str, first: int, stop: int) -> tuple[Any, Any]:
    """Engine blocks ``first`` to ``stop`` of the first prompt, behind those before them."""
    values: list[Any] = PROMPTS[0] if kind == "tokens" else hashes_of(PROMPTS[0])
    sequence = side.ids(kind, values)
    return sequence[: first * BLOCK_TOKENS], sequence[first * BLOCK_TOKENS : stop * BLOCK_TOKENS]


@pytest.mark.parametrize("kind", KINDS)
def test_with_larger_cache_blocks(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Cache blocks of two engine blocks, named by the hashes of both."""
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_BLOCK_SIZE", str(2 * BLOCK_TOKENS))
    pair = make_pair()
    assert pair.same(lambda side: side.cache.block_size) == 2 * BLOCK_TOKENS
    pair.same(lambda side: side.put(*parts(side, kind, 0, 4), ["a", "b"]))
    pair.same(lambda side: side.put(*parts(side, kind, 4, 8), ["c", "d"]))

    def ask(first: int, stop: int) -> None:
        pair.same(lambda side: side.cache.exists(*parts(side, kind, first, stop)))
        pair.same(lambda side: side.cache.acquire(*parts(side, kind, first, stop)))

    for first, stop in ((0, 10), (2, 10), (4, 7), (8, 10), (0, 3)):
        ask(first, stop)
    pair.same(lambda side: side.cache.exists(*parts(side, kind, 1, 9)))  # INVALID


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_bound_on_the_sequence(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_MAX_SEQ_LEN", "18")  # whole blocks: 20
    pair = make_pair()

    def put(first: int, stop: int) -> None:
        pair.same(lambda side: side.put(*parts(side, kind, first, stop), range(stop - first)))
        pair.same(lambda side: side.cache.exists(*parts(side, kind, 0, N_BLOCKS)))

    for first, stop in ((0, 3), (3, 5), (3, 8), (5, 8), (6, 8)):
        put(first, stop)


@pytest.mark.parametrize("policy", ["LRU", "FIFO", "S3FIFO"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_evictions(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, kind: str, policy: str) -> None:
    """Who is evicted is the policy's affair; both keep what was just put and deliver right bytes or none."""
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY", policy)
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB", str(128 * 1024 / 2**30))
    pair = make_pair()
    prompts = [list(range(1000 * p, 1000 * p + 4 * N_BLOCKS)) for p in range(1, 40)]

    def found(side: Side, number: int) -> list[bytes]:
        blocks = side.found(None, ids(side, number))
        assert blocks == side.named(*((number, block) for block in range(len(blocks)))), side.name
        return blocks

    def ids(side: Side, number: int) -> Any:
        values: list[Any] = prompts[number] if kind == "tokens" else hashes_of(prompts[number])
        return side.ids(kind, values)

    for side in pair.sides:
        for number in range(len(prompts)):
            status = side.put(None, ids(side, number), [(number, block) for block in range(N_BLOCKS)])
            assert status.value == 4 * N_BLOCKS, side.name
            assert len(found(side, number)) == N_BLOCKS, side.name
            for older in range(0, number, 7):
                found(side, older)
        assert any(len(found(side, number)) < N_BLOCKS for number in range(len(prompts))), side.name


def test_specs_and_statuses_are_the_same() -> None:
    package, theirs = library()
    from kvstore.compat import aibrix as ours

    for layout in ("NCLD", "LCND"):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
            specs = [
                spec.KVCacheBlockSpec(
                    16, dtype, spec.KVCacheBlockLayout[layout], spec.KVCacheTensorSpec([3, 4], range(5), 8)
                )
                for spec in (theirs, ours)
            ]
            for name in vars(specs[0]).keys() - {"block_layout", "tensor_spec"}:
                assert getattr(specs[0], name) == getattr(specs[1], name), name
            assert specs[0].signature == specs[1].signature
    assert [code.name for code in package.StatusCodes] == [code.name for code in ours.StatusCodes]
    for code in (code.name for code in package.StatusCodes):
        statuses = [lib.Status(lib.StatusCodes[code], None) for lib in (package, ours)]
        questions = [name for name in dir(package.Status) if name.startswith("is_")]
        assert [getattr(statuses[0], q)() for q in questions] == [getattr(statuses[1], q)() for q in questions]
        assert repr(statuses[0]) == repr(statuses[1])


def test_public_names_are_there() -> None:
    package, spec = library()
    from kvstore.compat import aibrix as ours

    wanted = set(package.__all__) | {"KVCacheBlockLayout", "KVCacheBlockSpec", "KVCacheTensorSpec", "ModelSpec"}
    assert all(hasattr(spec, name) or hasattr(package, name) for name in wanted)
    assert [name for name in sorted(wanted) if not hasattr(ours, name)] == []
