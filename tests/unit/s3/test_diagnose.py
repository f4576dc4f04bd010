"""What ``kvstore doctor`` says about a bucket, and the bucket's lifecycle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kvstore_s3.__main__ import main
from kvstore_s3.access import Access
from kvstore_s3.diagnose import diagnose
from kvstore_s3.lifecycle import LifecycleRule, lifecycle_rules, refresh_advice, set_lifecycle

from kvstore.backend import BackendContext, Finding
from tests.faults.s3_faults import Fault, S3FaultServer
from tests.support_s3 import ACCESS_KEY, SECRET_KEY, free_ports, make_bucket
from tests.unit.s3.conftest import BUCKET, options


def findings(url: str, *, read_only: bool = False, **changed: Any) -> Sequence[Finding]:
    return diagnose(BackendContext("s3", options(url, **changed), read_only=read_only))


def problems(found: Sequence[Finding]) -> str:
    """What is wrong, with the advice, as one text; no finding may show a secret."""
    text = "\n".join(f"{finding.what} -> {finding.advice}" for finding in found)
    assert SECRET_KEY not in text
    assert ACCESS_KEY not in text
    return "\n".join(f"{f.what} -> {f.advice}" for f in found if f.level == "problem")


def test_a_healthy_bucket_has_no_problem_and_stays_as_it_was(faulty: S3FaultServer, moto_bucket: str) -> None:
    for url in (faulty.url, moto_bucket):
        found = findings(url)
        assert problems(found) == ""
        text = "\n".join(finding.what for finding in found)
        for part in (
            "credentials come from the config (",
            "answers in",
            "is there",
            "fast data path",
            "a PUT takes",
            "HEAD",
            "GET",
            "LIST",
        ):
            assert part in text
    assert faulty.buckets[BUCKET] == {}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("bucket404"), ("'bucket'", "does not exist")),
        (Fault("forbid"), ("403", "s3:ListBucket")),
        (Fault("forbid", ("PUT",)), ("s3:PutObject",)),
        (Fault("forbid", ("DELETE",)), ("DELETE", "allow s3:DeleteObject")),
        (Fault("forbid", ("GET",), only="/probes/"), ("GET (s3:GetObject)",)),
        (Fault("region", region="eu-north-8"), ("region", "eu-north-8")),
        (Fault("skew"), ("clock is 3", " s behind the server's", "NTP")),
        (Fault("expired"), ("ExpiredToken", "renew")),
        (Fault("slow_down"), ("503", "connections")),
    ],
    ids=lambda value: f"{value.mode}-{value.methods[0]}" if isinstance(value, Fault) else "",
)
def test_a_fault_is_explained(faulty: S3FaultServer, fault: Fault, words: tuple[str, ...]) -> None:
    faulty.inject(fault)
    text = problems(findings(faulty.url))
    for word in words:
        assert word in text
    assert text.count("s3:ListBucket") <= 1  # what is missing is said once


def test_reading_only_writes_nothing(faulty: S3FaultServer) -> None:
    assert problems(findings(faulty.url, read_only=True)) == ""
    assert faulty.requests("PUT") == faulty.requests("DELETE") == []


def test_an_unreachable_endpoint_is_told_apart_from_an_unknown_name() -> None:
    (port,) = free_ports(1)
    assert "cannot be reached" in problems(findings(f"http://127.0.0.1:{port}"))
    assert "cannot be resolved" in problems(findings("http://no-such-host.invalid:9000"))


def test_missing_credentials_are_a_problem(faulty: S3FaultServer) -> None:
    text = problems(findings(faulty.url, access_key_id=None, secret_access_key=None))
    assert "no credentials" in text
    assert "S3Options" in problems(diagnose(BackendContext("s3", None)))


def test_a_server_that_ignores_conditions_is_a_warning(faulty: S3FaultServer) -> None:
    faulty.inject(Fault("ignore_conditions"))
    assert any(f.level == "warning" and "If-None-Match" in f.what for f in findings(faulty.url))


def test_a_bucket_that_opening_would_create_is_told(faulty: S3FaultServer) -> None:
    found = findings(faulty.url, bucket="later", create_bucket=True)
    assert not problems(found)
    assert "opening the tier creates it" in found[-1].what
    assert "later" not in faulty.buckets


@pytest.fixture
def ruled(moto_url: str) -> str:
    make_bucket(moto_url, "ruled")
    return moto_url


def test_a_lifecycle_rule_is_set_shown_and_removed(ruled: str) -> None:
    wanted = options(ruled, bucket="ruled")
    access = Access(wanted)
    assert lifecycle_rules(access, wanted) == []
    other = options(ruled, bucket="ruled", prefix="elsewhere")
    set_lifecycle(access, other, 3)
    set_lifecycle(access, wanted, 30)
    set_lifecycle(access, wanted, 14)
    rules = lifecycle_rules(access, wanted)
    assert {(rule.prefix, rule.days, rule.enabled) for rule in rules} == {
        ("kvstore/", 14, True),
        ("elsewhere/", 3, True),
    }
    assert [rule.days for rule in rules if rule.covers(wanted)] == [14]
    set_lifecycle(access, wanted, 0)
    assert [rule.prefix for rule in lifecycle_rules(access, wanted)] == ["elsewhere/"]
    set_lifecycle(access, other, 0)
    assert lifecycle_rules(access, wanted) == []
    access.close()


def test_refreshing_must_be_twice_as_frequent_as_expiry() -> None:
    rules = [LifecycleRule("r", "", 10, enabled=True)]
    assert "120h" in refresh_advice(options(None), rules)
    assert "120h" in refresh_advice(options(None, refresh_after=6 * 86400.0), rules)
    assert refresh_advice(options(None, refresh_after=5 * 86400.0), rules) == ""
    assert refresh_advice(options(None), [LifecycleRule("r", "", 10, enabled=False)]) == ""
    assert refresh_advice(options(None), [LifecycleRule("r", "other/", 10, enabled=True)]) == ""


def test_the_command_shows_and_sets_the_rule(ruled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "kvstore.toml"
    keys = f'access_key_id = "{ACCESS_KEY}"\nsecret_access_key = "{SECRET_KEY}"\n'
    config.write_text(f'[[l2]]\nbackend = "s3"\nbucket = "ruled"\nendpoint_url = "{ruled}"\n{keys}')
    assert main(["lifecycle", str(config)]) == 0
    assert "never expire" in capsys.readouterr().out
    assert main(["lifecycle", str(config), "--days", "7"]) == 0
    shown = capsys.readouterr().out
    assert "expire after 7 days" in shown
    assert "refresh_after" in shown
    assert main(["lifecycle", str(config), "--days", "0"]) == 0
    assert main(["lifecycle", str(config), "--days", "-1"]) == 2
    assert "'days'" in capsys.readouterr().err
    assert main(["lifecycle", str(config), "--tier", "nvme"]) == 2
    config.write_text(config.read_text().replace('"ruled"', '"gone-bucket"'))
    assert main(["lifecycle", str(config)]) == 3
    assert "NoSuchBucket" in capsys.readouterr().err
