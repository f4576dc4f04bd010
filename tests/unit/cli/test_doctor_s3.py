"""What ``kvstore doctor`` tells the user of a bucket, from the answers of a real and of a misbehaving server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.command import EXIT_FINDINGS, EXIT_OK, EXIT_UNAVAILABLE
from kvstore.cli.main import main
from tests.faults.s3_faults import Fault, S3FaultServer
from tests.support_s3 import ACCESS_KEY, SECRET_KEY

BUCKET = "kvcache"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3FaultServer]:
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with S3FaultServer(BUCKET) as server:
        yield server


def examine(
    server: S3FaultServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], **options: str
) -> tuple[int, dict[str, Any], str]:
    """Run doctor for people and for programs; returns the exit code, the tier's JSON, and the text."""
    tier = {
        "backend": "s3",
        "bucket": BUCKET,
        "endpoint_url": server.url,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
    } | options
    config = tmp_path / "k.toml"
    settings = "\n".join(f'{name} = "{value}"' for name, value in tier.items())
    config.write_text(f'[l1]\ncapacity = "1MiB"\n[[l2]]\n{settings}\n')
    code = main(["doctor", str(config), "--json"])
    report = json.loads(capsys.readouterr().out)["tiers"][0]
    assert main(["doctor", str(config)]) == code
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert SECRET_KEY not in text + json.dumps(report)
    assert ACCESS_KEY not in text + json.dumps(report)
    return code, report, text


def test_a_bucket_that_is_well_is_measured_and_left_empty(
    server: S3FaultServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, text = examine(server, tmp_path, capsys)
    assert code == EXIT_OK
    assert report["self_test"]["put_mb_s"] > 0
    assert "problem" not in {finding["level"] for finding in report["findings"]}
    assert f"bucket '{BUCKET}'" in text
    left = [key for key in server.buckets[BUCKET] if "/epochs/" not in key and "/namespaces/" not in key]
    assert left == []


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("forbid", ("403", "s3:ListBucket")),
        ("bucket404", ("does not exist", "create_bucket")),
        ("expired", ("ExpiredToken", "session token")),
        ("skew", ("clock",)),
        ("region", ("eu-south-9", "region")),
        ("slow_down", ("503", "fewer requests")),
    ],
)
def test_a_bucket_that_refuses_is_explained_with_what_to_do(
    mode: str, words: tuple[str, ...], server: S3FaultServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.inject(Fault(mode))
    code, report, text = examine(server, tmp_path, capsys)
    assert code == EXIT_FINDINGS
    problems = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert problems
    assert all(finding["advice"] for finding in problems)
    for word in words:
        assert word in text
    assert report["self_test"] is None


def test_a_server_that_hangs_does_not_hang_the_doctor(
    server: S3FaultServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.inject(Fault("hang"))
    started = time.monotonic()
    code, _, text = examine(server, tmp_path, capsys, read_timeout="200ms")
    assert code in {EXIT_FINDINGS, EXIT_UNAVAILABLE}
    assert time.monotonic() - started < 20
    assert "problem" in text


def test_a_server_that_is_not_there_is_a_problem_of_the_endpoint(
    server: S3FaultServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, text = examine(server, tmp_path, capsys, endpoint_url="http://127.0.0.1:9")
    assert code == EXIT_FINDINGS
    assert "is the server running" in text
