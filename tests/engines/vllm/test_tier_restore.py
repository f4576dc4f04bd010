"""Fresh processes restore from every medium what one process stored; a damaged block is never served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines")

from tests.engines.vllm.conftest import store_folder
from tests.engines.vllm.rig import BLOCK_TOKENS, Engine, Run, prompt, run_engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = prompt(1, 700)
WHOLE_BLOCKS = 700 // BLOCK_TOKENS
MEDIA = ("lmdb", "nvme", "tree", "s3")


@dataclass(frozen=True)
class Stored:
    tiers: dict[str, dict[str, Any]]
    fs: dict[str, Any]
    cold: dict[str, Any]
    native_hit: dict[str, Any]


@pytest.fixture(scope="module")
def stored(
    tiny_model: Path, make_tier: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Stored:
    """One engine with all media as tiers: vLLM stores every block in each of them."""
    tiers = {
        "lmdb": make_tier("lmdb"),
        "nvme": make_tier("nvme"),
        "tree": make_tier("nvme", layout="tree", pack=1, codec="none"),
        "s3": make_tier("s3"),
    }
    fs = {"type": "fs", "root_dir": str(tmp_path_factory.mktemp("fs"))}
    runs = [Run([PROMPT], kv=True, tiers=True), Run([PROMPT], kv=True)]
    report = run_engines(tiny_model, [Engine(runs=runs, tiers=[*tiers.values(), fs])])
    cold, native_hit = report["engines"][0]["runs"]
    assert cold["cached"] == [0]
    assert native_hit["cached"] == [WHOLE_BLOCKS * BLOCK_TOKENS]
    return Stored(tiers, fs, cold, native_hit)


@pytest.fixture(scope="module")
def restored(tiny_model: Path, stored: Stored) -> dict[str, dict[str, Any]]:
    """A fresh process; each medium serves an engine of its own."""
    engines = [Engine(runs=[Run([PROMPT], kv=True, tiers=True)], tiers=[stored.tiers[name]]) for name in MEDIA]
    report = run_engines(tiny_model, engines)
    return {name: engine["runs"][0] for name, engine in zip(MEDIA, report["engines"], strict=True)}


@pytest.mark.parametrize("medium", MEDIA)
def test_a_fresh_process_restores_every_whole_block(restored: dict[str, Any], medium: str) -> None:
    run = restored[medium]
    assert run["cached"] == [WHOLE_BLOCKS * BLOCK_TOKENS]
    (tier,) = run["tiers"]
    assert tier["stats"]["cache"]["hits"] == WHOLE_BLOCKS
    assert tier["stats"]["tiers"][0]["counters"]["stored"] == 0


@pytest.mark.parametrize("medium", MEDIA)
def test_restored_kv_is_bit_identical(stored: Stored, restored: dict[str, Any], medium: str) -> None:
    kv = restored[medium]["kv"]
    assert len(kv) >= WHOLE_BLOCKS
    assert kv == {block_hash: stored.cold["kv"][block_hash] for block_hash in kv}


@pytest.mark.parametrize("medium", MEDIA)
def test_a_store_hit_gives_the_text_of_a_native_prefix_hit(
    stored: Stored, restored: dict[str, Any], medium: str
) -> None:
    assert restored[medium]["tokens"] == stored.native_hit["tokens"]


def test_all_media_share_one_namespace(stored: Stored, restored: dict[str, Any]) -> None:
    namespaces = {run["tiers"][0]["namespace"] for run in restored.values()}
    assert namespaces == {stored.cold["tiers"][0]["namespace"]}


def test_a_damaged_block_is_recomputed_and_stored_again_where_the_stock_tier_serves_it(
    tiny_model: Path, stored: Stored, restored: dict[str, Any]
) -> None:
    damaged = 5
    # Files of equal blocks differ in name and head only, so that the same block is damaged in both stores.
    ours = _file_of_block(store_folder(stored.tiers["tree"]), damaged)
    theirs = _file_of_block(Path(stored.fs["root_dir"]), damaged)
    for file in (ours, theirs):
        _flip_a_byte(file)
    again = Run([PROMPT], kv=True, tiers=True)
    report = run_engines(
        tiny_model,
        [
            Engine(runs=[again], tiers=[stored.tiers["tree"]]),
            Engine(runs=[again], tiers=[stored.tiers["tree"]]),
            Engine(runs=[again], tiers=[stored.fs]),
        ],
    )
    first, second, stock = (engine["runs"][0] for engine in report["engines"])

    (usable,) = first["cached"]
    assert 0 <= usable < WHOLE_BLOCKS * BLOCK_TOKENS
    assert usable % BLOCK_TOKENS == 0
    counters = first["tiers"][0]["stats"]["tiers"][0]["counters"]
    assert counters["corrupt"] == 1
    assert first["tokens"] == stored.native_hit["tokens"]

    assert second["cached"] == [WHOLE_BLOCKS * BLOCK_TOKENS]
    assert second["kv"] == {block_hash: stored.cold["kv"][block_hash] for block_hash in second["kv"]}
    assert second["tiers"][0]["stats"]["tiers"][0]["counters"]["corrupt"] == 0

    assert stock["cached"] == [WHOLE_BLOCKS * BLOCK_TOKENS]
    wrong = [block_hash for block_hash in stock["kv"] if stock["kv"][block_hash] != stored.cold["kv"][block_hash]]
    assert wrong, "the stock tier noticed the damage"


def _file_of_block(folder: Path, number: int) -> Path:
    """A data file of the store, always the same one."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size >= 1 << 14)
    return files[number]


def _flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-len(data) // 3] ^= 0x08
    file.write_bytes(data)
