"""The verdict follows from the facts, and the reports say the same."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvstore.cli.demo.facts import Computed, Outcome, Restored
from kvstore.cli.demo.html import write_html
from kvstore.cli.demo.png import write_png
from kvstore.cli.demo.text import report_lines


def failed(outcome: Outcome) -> list[str]:
    return [check.name for check in outcome.checks() if not check.passed]


def test_everything_held(outcome: Outcome) -> None:
    assert failed(outcome) == []
    assert outcome.ratio == 20.0  # the quicker of the two cold runs over the first restored one


def test_different_kv_fails(outcome: Outcome) -> None:
    restored = replace(outcome.restored, kv_sha256="cd" * 32)

    assert failed(replace(outcome, restored=restored)) == ["bit-identical"]


@pytest.mark.parametrize("change", [{"reference_token_ids": [4]}, {"answers": None}])
def test_different_tokens_fail(outcome: Outcome, change: dict[str, list[int] | None]) -> None:
    first, second = outcome.restored.answers
    answers = [replace(first, token_ids=[1, 9]), second]
    restored = replace(outcome.restored, **{k: answers if v is None else v for k, v in change.items()})  # type: ignore[arg-type]

    assert failed(replace(outcome, restored=restored)) == ["tokens identical"]


def test_nothing_restored_fails(outcome: Outcome) -> None:
    first, second = outcome.restored.answers
    restored = replace(outcome.restored, answers=[first, replace(second, restored_tokens=0)])

    assert failed(replace(outcome, restored=restored)) == ["restored"]


def test_same_process_is_no_restart(outcome: Outcome) -> None:
    assert failed(replace(outcome, restored=replace(outcome.restored, pid=10))) == ["new process"]


def test_too_slow_fails_only_when_a_ratio_is_asked_for(outcome: Outcome) -> None:
    assert failed(replace(outcome, min_ratio=20.5)) == ["fast enough"]
    assert failed(replace(outcome, min_ratio=0.0)) == []


def test_facts_survive_the_way_between_processes(outcome: Outcome) -> None:
    computed, restored = (json.loads(json.dumps(asdict(part))) for part in (outcome.computed, outcome.restored))

    assert Outcome(Computed.from_json(computed), Restored.from_json(restored), 10.0) == outcome


def test_text_says_what_was_measured(outcome: Outcome) -> None:
    text = "\n".join(report_lines(outcome, [Path("demo-report/report.html")]))

    for fact in (
        "20.0x faster", "first opening after the restart; opened again: 300, 400 ms", "bit-identical:    yes", "tokens identical: yes", "1,984", "43.6 MiB raw, 29.6 MiB stored",
        "codec planes, 1.475x", "/somewhere/demo-store", "fingerprint", "10,000 ms", "demo-report/report.html",
    ):  # fmt: skip
        assert fact in text


def test_text_shouts_about_a_failure(outcome: Outcome) -> None:
    text = "\n".join(report_lines(replace(outcome, min_ratio=50.0), []))

    assert "fast enough:      NO  (20.0x, at least 50x)" in text


def test_html_draws_to_scale_and_is_self_contained(outcome: Outcome, tmp_path: Path) -> None:
    page = write_html(outcome, tmp_path / "report.html").read_text(encoding="utf-8")

    svg = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    drawn = ET.fromstring(svg)  # noqa: S314 - our own page
    bars = [float(bar.get("width", "0")) for bar in drawn.iter("rect")]
    assert bars[0] / bars[1] == pytest.approx(outcome.ratio, rel=0.01)
    assert "Who &lt;is&gt; it?" in page
    assert "20.0x" in page
    for word in ("http", "<script", "src=", "@import"):
        assert word not in page


def test_png_is_a_picture(outcome: Outcome, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the demo extra is not installed")

    files = write_png(outcome, tmp_path / "report.png")

    assert files == [tmp_path / "report.png"]
    assert files[0].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert files[0].stat().st_size > 10_000


def test_text_says_when_the_cold_time_is_slow_for_a_reason(outcome: Outcome) -> None:
    def said(dtype: str, instructions: str) -> bool:
        machine = {"model": "m", "dtype": dtype, "CPU bfloat16": instructions}
        lines = report_lines(replace(outcome, computed=replace(outcome.computed, machine=machine)), [])
        return any("emulates bfloat16" in line for line in lines)

    assert said("bfloat16", "emulated")
    assert not said("bfloat16", "native")
    assert not said("float32", "emulated")
