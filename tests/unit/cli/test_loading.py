"""Load or recompute, as the doctor reckons it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import BlockSpec, KVCache, Namespace
from kvstore.cli.command import EXIT_OK, EXIT_USAGE
from kvstore.cli.loading import PROMPT_TOKENS, PromptBlocks, judge, stored_blocks
from kvstore.cli.main import main
from kvstore.cli.selftest import Timings

MIB = 1 << 20
BLOCKS = PromptBlocks(block_bytes=2 * MIB, block_tokens=16, source="said")
# 10 ms of latency and 1 ms for each MiB
DISTANT = Timings(
    records=8,
    record_bytes=MIB,
    put_s=1.0,
    get_s=0.018,
    one_put_s=1.0,
    one_get_s=0.011,
    exists_s=1.0,
    delete_s=1.0,
)


def test_latency_and_bandwidth_follow_from_two_reads() -> None:
    verdict = judge(DISTANT, BLOCKS)
    assert verdict.latency_s == pytest.approx(0.010)
    assert verdict.bytes_per_s == pytest.approx(1000 * MIB)
    assert [p.tokens for p in verdict.prompts] == list(PROMPT_TOKENS)
    assert [p.load_s for p in verdict.prompts] == pytest.approx([0.138, 1.034, 4.106])


@pytest.mark.parametrize(("factor", "pays"), [(0.99, True), (1.01, False)])
def test_loading_pays_below_the_break_even_speed_and_not_above(factor: float, pays: bool) -> None:
    even = judge(DISTANT, BLOCKS).prompts[1].break_even_tokens_per_s
    assert even == pytest.approx(8192 / 1.034)
    verdict = judge(DISTANT, BLOCKS, factor * even)
    assert verdict.prompts[1].pays is pays
    assert verdict.prompts[1].recompute_s == pytest.approx(1.034 / factor)


def test_without_a_speed_people_are_told_the_break_even() -> None:
    finding = judge(DISTANT, BLOCKS).finding()
    assert finding.level == "ok"
    assert "128 KiB a token, said" in finding.what
    assert "1k tokens in 138.0 ms, 8k tokens in 1.03 s, 32k tokens in 4.11 s" in finding.what
    assert finding.advice == (
        "this tier pays for any engine that prefills slower than 7,420 (prompts of 1k tokens), "
        "7,923 (prompts of 8k tokens), 7,981 (prompts of 32k tokens) tokens/s"
    )


def test_one_break_even_speed_is_said_once() -> None:
    near = replace(DISTANT, one_get_s=0.001, get_s=0.008)
    assert judge(near, BLOCKS).finding().advice.endswith("slower than 8,000 tokens/s")


def test_with_a_speed_people_are_told_what_is_faster() -> None:
    slower = judge(DISTANT, BLOCKS, 80_000).finding()
    assert slower.level == "warning"
    assert "32k tokens: loading is 10.0 times slower, and is declined" in slower.advice
    faster = judge(DISTANT, BLOCKS, 800).finding()
    assert faster.level == "ok"
    assert "32k tokens: loading is 10.0 times faster" in faster.advice


def test_a_medium_that_is_quicker_with_more_has_no_negative_times() -> None:
    verdict = judge(replace(DISTANT, get_s=0.005), BLOCKS)
    assert verdict.bytes_per_s is None
    assert all(p.load_s > 0 for p in verdict.prompts)


def test_what_the_store_keeps_says_what_a_block_is() -> None:
    small = BlockSpec(layers=2, kv_heads=1, head_dim=16, block_tokens=16, dtype="bfloat16")
    large = BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=32, dtype="bfloat16")
    kept = [Namespace(model=name, revision="r").to_json(spec) for name, spec in (("small", small), ("large", large))]
    assert stored_blocks([b"no json", *(text.encode() for text in kept)]) == PromptBlocks(
        large.nbytes, 32, "as stored for large"
    )
    assert stored_blocks([b"{}"]) is None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "k.toml"
    path.write_text('[l1]\ncapacity = "1MiB"\n[gate]\nprefill_tokens_per_s = 3000\n[[l2]]\nbackend = "memory"\n')
    return path


def test_the_doctor_judges_each_tier(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = ["--block-bytes", "1MiB", "--block-tokens", "32"]
    assert main(["doctor", str(config), "--json", *blocks]) == EXIT_OK
    load = json.loads(capsys.readouterr().out)["tiers"][0]["load"]
    assert load["prefill_tokens_per_s"] == 3000
    assert load["blocks"] == {"block_bytes": MIB, "block_tokens": 32, "source": "as asked for"}
    assert [p["tokens"] for p in load["prompts"]] == list(PROMPT_TOKENS)
    assert load["prompts"][0]["recompute_s"] == pytest.approx(1024 / 3000)
    assert main(["doctor", str(config), "--prefill-tokens-per-s", "5"]) == EXIT_OK
    assert "against recomputing at 5 tokens/s" in capsys.readouterr().out


def test_a_warning_about_loading_is_counted(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), "--prefill-tokens-per-s", "1000000000"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "warning  loading a prompt's KV" in text
    assert "1 warning" in text.splitlines()[-1]


@pytest.mark.parametrize("half", [["--block-bytes", "1MiB"], ["--block-tokens", "16"]])
def test_half_of_a_block_is_refused(config: Path, half: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), *half]) == EXIT_USAGE
    assert "give both, or neither" in capsys.readouterr().err


def test_the_doctor_judges_by_the_blocks_that_a_store_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.toml"
    path.write_text(
        f'[l1]\ncapacity = "1MiB"\n[[l2]]\nbackend = "lmdb"\npath = "{tmp_path}/store"\ncapacity = "64MiB"\n'
    )
    spec = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=32, dtype="bfloat16")
    with KVCache.open(path, spec=spec, namespace=Namespace(model="org/model", revision="r1")):
        pass
    assert main(["doctor", str(path), "--json"]) == EXIT_OK
    blocks = json.loads(capsys.readouterr().out)["tiers"][0]["load"]["blocks"]
    assert blocks == {"block_bytes": spec.nbytes, "block_tokens": 32, "source": "as stored for org/model"}
