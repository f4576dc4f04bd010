"""The store commands on every medium that keeps data at rest, each named by a config file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_UNAVAILABLE
from kvstore.cli.main import main
from tests.faults.s3_faults import S3FaultServer
from tests.support import blocks_of

SPEC = BlockSpec(layers=4, kv_heads=1, head_dim=64, block_tokens=16, dtype="bfloat16")
KEY = KVCacheKey.from_tokens(range(16 * 20), block_tokens=16)  # a pack of 16 and one of 4, where there are packs


@pytest.fixture
def filled(config: Path) -> Path:
    with KVCache.open(config, spec=SPEC, namespace=Namespace(model="m", revision="r")) as cache:
        assert cache.put(KEY, blocks_of(SPEC, len(KEY))) == len(KEY)
        cache.flush(20)
    return config


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == EXIT_OK
    out = capsys.readouterr().out
    return [json.loads(line) for line in out.splitlines()] if arguments[0] == "ls" else json.loads(out)


def test_ls_lists_every_block(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = sorted(run_json(capsys, "ls", str(filled)), key=lambda row: row["block_index"])
    assert [row["digest"] for row in rows] == [digest.hex() for digest in KEY.digests]
    assert [row["block_index"] for row in rows] == list(range(len(KEY)))
    assert len(run_json(capsys, "ls", str(filled), "--limit", "3")) == 3


def test_stat_counts_blocks_and_tokens(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run_json(capsys, "stat", str(filled))
    (namespace,) = report["namespaces"]
    assert (namespace["records"], namespace["tokens"], namespace["cleared"]) == (20, 320, 0)
    assert report["usage"]["payload_bytes"] >= 20 * SPEC.nbytes
    assert report["facts"]
    assert main(["stat", str(filled)]) == EXIT_OK
    assert "20 records, 320 tokens" in capsys.readouterr().out


def test_verify_finds_every_record_sound(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run_json(capsys, "verify", str(filled))
    assert (report["records"], report["sound"], report["corrupt"], report["unread"]) == (20, 20, [], 0)


def test_gc_deletes_everything_that_is_old_enough(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run_json(capsys, "gc", str(filled), "--older-than", "1h")
    assert report["deleted"] == 0
    (report,) = run_json(capsys, "gc", str(filled), "--older-than", "0s", "--dry-run")
    assert report["deleted"] == 20
    (report,) = run_json(capsys, "gc", str(filled), "--older-than", "0s")
    assert report["deleted"] in {20, 2}  # two packs, where a listing does not tell the records inside
    assert report["deleted_bytes"] >= 20 * SPEC.nbytes
    with KVCache.open(filled, spec=SPEC, namespace=Namespace(model="m", revision="r")) as cache:
        assert cache.get(KEY, torch.zeros((20, *SPEC.shape), dtype=torch.bfloat16)) == 0


def test_doctor_finds_nothing_wrong(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "doctor", str(config))
    assert report["tiers"][0]["self_test"]["get_mb_s"] > 0


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_a_store_that_is_not_there_is_not_made(
    command: str, config: Path, server: S3FaultServer, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {key: dict(objects) for key, objects in server.buckets.items()}
    code = main([command, str(config)])
    assert code in {EXIT_OK, EXIT_UNAVAILABLE}  # a bucket is there, with nothing in it
    assert code != EXIT_FINDINGS
    assert [path.name for path in config.parent.iterdir()] == ["k.toml"]
    assert {key: dict(objects) for key, objects in server.buckets.items()} == before
