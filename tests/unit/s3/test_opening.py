"""What is wrong with a bucket is said when it is opened, in time, naming what to change (A13)."""

from __future__ import annotations

import time
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest
from kvstore_s3.opening import open_bucket
from kvstore_s3.options import S3Options
from moto import mock_aws

from kvstore.errors import (
    BackendError,
    BackendPermissionError,
    BackendTimeoutError,
    BackendUnavailableError,
    ConfigError,
)
from kvstore.types import Call
from tests.faults.s3_faults import Fault, S3FaultServer
from tests.support_s3 import ACCESS_KEY, SECRET_KEY, free_ports
from tests.unit.s3.conftest import BUCKET, LOGGER, opened
from tests.unit.s3.objects import call, keys, read, write


def test_a_missing_bucket_is_named_with_its_region(faulty: S3FaultServer, moto_url: str) -> None:
    for url in (faulty.url, moto_url):
        with pytest.raises(ConfigError, match=r"'bucket'.*'no-such-bucket'.*does not exist.*us-west-7"):
            opened(url, bucket="no-such-bucket", region="us-west-7")


def test_a_missing_bucket_is_created_on_request(faulty: S3FaultServer) -> None:
    medium = opened(faulty.url, bucket="fresh", create_bucket=True)
    assert write(medium, "aa/k", b"x")
    assert "fresh" in faulty.buckets
    medium.close()


def test_another_region_is_named(faulty: S3FaultServer) -> None:
    faulty.inject(Fault("region", region="ap-east-9"))
    with pytest.raises(ConfigError, match=r"'region'.*region = \"ap-east-9\""):
        opened(faulty.url)


@pytest.mark.parametrize(
    ("mode", "error", "text"),
    [
        ("forbid", BackendPermissionError, "s3:ListBucket"),
        ("skew", BackendPermissionError, "clock"),
        ("expired", BackendPermissionError, "ExpiredToken"),
        ("slow_down", BackendUnavailableError, "503"),
        ("error500", BackendUnavailableError, "500"),
    ],
)
def test_a_refusal_says_why(faulty: S3FaultServer, mode: str, error: type[BackendError], text: str) -> None:
    faulty.inject(Fault(mode))
    began = time.monotonic()
    with pytest.raises(error, match=text):
        opened(faulty.url)
    assert time.monotonic() - began < 5.0


def test_no_credentials_are_a_refusal_within_seconds(faulty: S3FaultServer) -> None:
    began = time.monotonic()
    with pytest.raises(BackendPermissionError, match="no credentials"):
        open_bucket(S3Options(bucket=BUCKET, endpoint_url=faulty.url), tier="s3", read_only=False, logger=LOGGER)
    assert time.monotonic() - began < 5.0
    assert faulty.requests() == []


def rotating(tmp_path: Path, expires_in_s: float) -> str:
    """An AWS config whose profile asks a program for credentials that are other ones each time."""
    expiration = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + expires_in_s))
    answer = (
        '{"Version": 1, "AccessKeyId": "KEY%d", "SecretAccessKey": "s", "SessionToken": "T%d", "Expiration": "WHEN"}'
    )
    calls = tmp_path / "calls"
    script = tmp_path / "credentials.sh"
    script.write_text(f"echo x >> {calls}; n=$(wc -l < {calls}); printf '{answer}' $n $n".replace("WHEN", expiration))
    config = tmp_path / "config"
    config.write_text(f"[profile rotating]\ncredential_process = sh {script}\n")
    return str(config)


def test_credentials_that_expire_are_renewed_without_a_failure(
    faulty: S3FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", rotating(tmp_path, 60))  # botocore renews what has less than 10 minutes left
    medium = opened(faulty.url, data_path=path, profile="rotating", access_key_id=None, secret_access_key=None)
    faulty.log.clear()
    for _ in range(3):
        assert write(medium, "aa/k", b"x")
    puts = faulty.requests("PUT")
    used = [entry.headers["authorization"].partition("Credential=")[2].partition("/")[0] for entry in puts]
    assert len(set(used)) == 3
    assert [entry.headers["x-amz-security-token"] for entry in puts] == [key.replace("KEY", "T") for key in used]
    medium.close()


def test_credentials_that_cannot_be_renewed_are_a_refusal(
    faulty: S3FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    config = rotating(tmp_path, 60)
    monkeypatch.setenv("AWS_CONFIG_FILE", config)
    medium = opened(faulty.url, data_path=path, profile="rotating", access_key_id=None, secret_access_key=None)
    for spoilt in (rotating(tmp_path, -60), ""):
        if not spoilt:
            (tmp_path / "credentials.sh").write_text("exit 1")
        for ask in (lambda: write(medium, "aa/k", b"x"), lambda: medium.head("aa/k", call()), lambda: keys(medium)):
            with pytest.raises(BackendPermissionError):
                ask()
    with pytest.raises(BackendPermissionError):
        opened(faulty.url, data_path=path, profile="rotating", access_key_id=None, secret_access_key=None)
    medium.close()


def test_a_profile_that_does_not_exist_is_a_wrong_option(faulty: S3FaultServer) -> None:
    with pytest.raises(ConfigError, match=r"'profile'.*nobody"):
        opened(faulty.url, profile="nobody", access_key_id=None, secret_access_key=None)


def test_a_hung_endpoint_is_given_up_within_three_seconds(faulty: S3FaultServer) -> None:
    faulty.inject(Fault("hang"))
    began = time.monotonic()
    with pytest.raises(BackendTimeoutError):
        opened(faulty.url)
    assert time.monotonic() - began < 3.0


def test_a_closed_port_is_unavailable_at_once() -> None:
    (port,) = free_ports(1)
    began = time.monotonic()
    with pytest.raises(BackendUnavailableError, match=f"127.0.0.1:{port}"):
        opened(f"http://127.0.0.1:{port}")
    assert time.monotonic() - began < 3.0


def test_put_once_is_found_out_and_leaves_nothing(faulty: S3FaultServer, path: str) -> None:
    for mode, honoured in (("ok", True), ("ignore_conditions", False)):
        faulty.inject(Fault(mode))
        medium = opened(faulty.url, data_path=path)
        assert medium.put_once is honoured
        assert keys(medium) == []
        medium.close()


def test_put_once_never_asks_for_it(faulty: S3FaultServer, path: str) -> None:
    medium = opened(faulty.url, data_path=path, put_once="never")
    assert write(medium, "aa/k", b"1", once=True)
    assert write(medium, "aa/k", b"2", once=True)
    assert all("if-none-match" not in entry.headers for entry in faulty.requests("PUT"))
    medium.close()


@pytest.mark.s3server
def test_a_server_that_ignores_conditions_is_written_twice(rclone_url: str, path: str) -> None:
    medium = opened(rclone_url, prefix=f"once/{path}", data_path=path)
    assert not medium.put_once
    assert write(medium, "aa/k", b"first", once=True)
    assert write(medium, "aa/k", b"second", once=True)
    assert read(medium, "aa/k") == b"second"
    assert read(medium, "aa/k", 2, 4) == b"co"
    assert read(medium, "aa/none") is None
    medium.remove(["aa/k", "aa/none"], call())
    assert keys(medium) == []
    medium.close()


@pytest.mark.s3server
def test_wrong_keys_are_refused_by_a_real_server(seaweedfs_bucket: str, path: str) -> None:
    with pytest.raises(BackendPermissionError):
        opened(seaweedfs_bucket, data_path=path, secret_access_key="wrong")  # noqa: S106 - meant to be
    with pytest.raises(BackendPermissionError):
        opened(seaweedfs_bucket, data_path=path, access_key_id="nobody")


@pytest.mark.s3server
def test_a_real_server_accepts_payloads_without_signature(seaweedfs_bucket: str) -> None:
    medium = opened(seaweedfs_bucket, data_path="fast")
    assert medium._path._sign_payload is False  # type: ignore[attr-defined]
    medium.close()


def test_payloads_are_signed_where_the_server_wants_it(faulty: S3FaultServer) -> None:
    faulty.inject(Fault("refuse_unsigned"))
    medium = opened(faulty.url)
    assert medium.describe()["data path"] == "fast"
    assert write(medium, "aa/k", b"signed")
    assert faulty.requests("PUT", "aa/k")[0].headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"
    assert read(medium, "aa/k") == b"signed"
    medium.close()


def test_no_checksum_headers_are_sent(faulty: S3FaultServer, path: str) -> None:
    faulty.inject(Fault("refuse_checksums", ("GET", "HEAD", "PUT")))
    medium = opened(faulty.url, data_path=path)
    for nbytes in (10, 32 << 10, 5 << 20):
        assert write(medium, "aa/k", bytes(nbytes))
        assert read(medium, "aa/k") == bytes(nbytes)
    medium.close()


def test_an_account_that_may_only_read_opens_with_a_warning(
    faulty: S3FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(faulty.url)
    write(first, "aa/k", b"there")
    first.close()
    faulty.inject(Fault("forbid", ("PUT", "DELETE")))
    medium = opened(faulty.url)
    assert ["writing is refused" in record.message for record in caplog.records] == [True]
    assert read(medium, "aa/k") == b"there"
    with pytest.raises(BackendPermissionError):
        write(medium, "aa/new", b"x")
    medium.close()


def test_reading_only_writes_nothing(faulty: S3FaultServer, path: str) -> None:
    medium = opened(faulty.url, data_path=path, read_only=True)
    assert read(medium, "aa/k") is None
    assert faulty.requests("PUT") == faulty.requests("DELETE") == []
    medium.close()


def test_an_account_that_may_not_look_at_the_bucket_but_may_read_opens(faulty: S3FaultServer) -> None:
    faulty.inject(Fault("forbid", ("HEAD",)))
    medium = opened(faulty.url)
    assert medium.head("aa/none", call()) is None
    medium.close()


def test_objects_carry_what_the_options_say(faulty: S3FaultServer, path: str) -> None:
    medium = opened(
        faulty.url, data_path=path, storage_class="STANDARD_IA", sse="aws:kms", sse_kms_key_id="key-1", prefix="a/b"
    )
    write(medium, "aa/k", b"x", blocks=5)
    headers = faulty.requests("PUT", "/a/b/aa/k")[0].headers
    assert headers["x-amz-storage-class"] == "STANDARD_IA"
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
    assert headers["x-amz-meta-kvstore-blocks"] == "5"
    medium.close()


def test_a_proxy_is_left_to_boto3(faulty: S3FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", faulty.url)
    beyond = "http://s3.invalid:9000"
    with pytest.raises(ConfigError, match=r"'data_path'.*proxy"):
        opened(beyond, data_path="fast")
    medium = opened(beyond)
    assert medium.describe()["data path"] == "boto3"
    assert write(medium, "aa/k", b"x")
    assert read(medium, "aa/k") == b"x"
    medium.close()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    medium = opened(faulty.url)
    assert medium.describe()["data path"] == "fast"
    medium.close()


def test_a_simulated_aws_is_left_to_boto3() -> None:
    simulated = mock_aws()
    simulated.start(reset=False)  # what moto's servers in this process hold is other tests'
    try:
        boto3.client(
            "s3", region_name="us-east-1", aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY
        ).create_bucket(Bucket="simulated")
        medium = opened(None, bucket="simulated")
        assert medium.describe()["data path"] == "boto3"
        assert write(medium, "aa/k", b"x", once=True)
        assert read(medium, "aa/k") == b"x"
        medium.close()
    finally:
        simulated.stop()


def test_nothing_stays_open_after_a_failed_opening(faulty: S3FaultServer) -> None:
    fds = Path("/proc/self/fd")
    faulty.inject(Fault("not_implemented", ("PUT",)))
    opened(faulty.url).close()
    before = len(list(fds.iterdir()))
    for _ in range(3):
        faulty.inject(Fault("error500", ("PUT",)))
        with pytest.raises(BackendUnavailableError):
            opened(faulty.url)
    assert len(list(fds.iterdir())) <= before + 1  # the server's end of a connection may still be closing
    assert Call.within(1).remaining() > 0
