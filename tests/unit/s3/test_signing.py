"""Requests of our own are the ones that botocore would send."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import S3SigV4Auth  # type: ignore[import-untyped]
from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]
from botocore.credentials import Credentials  # type: ignore[import-untyped]
from kvstore_s3.access import Access, keys_of
from kvstore_s3.data_path import put_headers
from kvstore_s3.options import S3Options
from kvstore_s3.plan import UnfitError, make_plan
from kvstore_s3.signing import EMPTY_SHA256, UNSIGNED, Keys, Signer, payload_sha256

from tests.unit.s3.conftest import options

KEYS = (
    "kvstore/ab/0123456789abcdef/00ab",
    "k=v/a.b_c-d/~e",
    "A" * 512,
)


def botocore_signature(method: str, url: str, head: str, keys: Keys, region: str) -> str:
    """Sign what we sent with botocore's own signer."""
    lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    ours = lines.pop("authorization")
    request = AWSRequest(method, url, headers=lines)
    request.context["timestamp"] = lines["x-amz-date"]
    signer = S3SigV4Auth(Credentials(keys.access_key, keys.secret_key, keys.token), "s3", region)
    canonical = signer.canonical_request(request)
    theirs: str = signer.signature(signer.string_to_sign(request, canonical), request)
    assert ours.startswith(f"AWS4-HMAC-SHA256 Credential={signer.scope(request)}, SignedHeaders=")
    assert signer.signed_headers(signer.headers_to_sign(request)) in ours
    assert ours.endswith(f"Signature={theirs}")
    return theirs


@pytest.mark.parametrize("key", KEYS, ids=["usual", "odd", "long"])
@pytest.mark.parametrize("token", [None, "session/token+="], ids=["plain", "token"])
@pytest.mark.parametrize(("method", "payload"), [("GET", EMPTY_SHA256), ("HEAD", EMPTY_SHA256), ("PUT", UNSIGNED)])
def test_signatures_are_botocores(key: str, token: str | None, method: str, payload: str) -> None:
    keys = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", token)
    path = f"/bucket/{quote(key, safe='/~')}"
    headers = put_headers(options(None, sse="AES256", storage_class="STANDARD_IA"), 16) if method == "PUT" else {}
    head = Signer("eu-west-3").head(f"{method} {path}", "host.example:9000", headers, keys, payload=payload)
    assert head.startswith(f"{method} {path} HTTP/1.1\r\n")
    assert botocore_signature(method, f"http://host.example:9000{path}", head, keys, "eu-west-3")


def test_a_signed_payload_is_its_hash() -> None:
    assert payload_sha256([b"ab", memoryview(b"c")]) == payload_sha256([b"abc"])
    assert payload_sha256([]) == EMPTY_SHA256


def test_the_key_of_the_day_follows_the_secret() -> None:
    signer = Signer("us-east-1")
    signed = [("host", "h"), ("x-amz-date", "20260101T000000Z")]
    first = signer.signature("GET /", signed, Keys("a", "one", None), UNSIGNED)
    assert signer.signature("GET /", signed, Keys("a", "two", None), UNSIGNED) != first
    assert signer.signature("GET /", signed, Keys("a", "one", None), UNSIGNED) == first
    next_day = [("host", "h"), ("x-amz-date", "20260102T000000Z")]
    assert signer.signature("GET /", next_day, Keys("a", "one", None), UNSIGNED) != first


@pytest.mark.parametrize(
    ("changed", "host", "path"),
    [
        ({}, "bucket.s3.eu-west-3.amazonaws.com", "/"),
        ({"addressing_style": "path"}, "s3.eu-west-3.amazonaws.com", "/bucket/"),
        ({"bucket": "dotted.bucket"}, "s3.eu-west-3.amazonaws.com", "/dotted.bucket/"),
        ({"endpoint_url": "http://127.0.0.1:9000"}, "127.0.0.1:9000", "/bucket/"),
        ({"endpoint_url": "http://[::1]:9000/base"}, "[::1]:9000", "/base/bucket/"),
        ({"endpoint_url": "https://s.example", "addressing_style": "virtual"}, "bucket.s.example", "/"),
    ],
)
def test_the_plan_is_what_boto3_would_do(changed: dict[str, Any], host: str, path: str) -> None:
    access = Access(S3Options(**_with(changed)))
    plan = make_plan(access.client(), S3Options(**_with(changed)))
    assert (plan.host, plan.path, plan.region) == (host, path, "eu-west-3")
    assert plan.endpoint.host == (urlsplit(f"//{host}").hostname or "")
    assert (plan.endpoint.tls is None) is ("endpoint_url" in changed and changed["endpoint_url"].startswith("http:"))
    access.close()


def test_a_directory_bucket_is_left_to_boto3() -> None:
    wanted = S3Options(**_with({"bucket": "name--use1-az4--x-s3"}))
    access = Access(wanted)
    with pytest.raises(UnfitError, match="S3 Express"):
        make_plan(access.client(), wanted)
    access.close()


def test_other_signatures_are_left_to_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = S3Options(**_with({}))
    access = Access(wanted)
    client = access.client()
    monkeypatch.setattr(Signer, "signature", lambda *_: "0" * 64)
    with pytest.raises(UnfitError, match="not understood"):
        make_plan(client, wanted)
    access.close()


def test_credentials_are_asked_for_each_request() -> None:
    class Rotating:
        calls = 0

        def get_frozen_credentials(self) -> Any:
            self.calls += 1
            return Credentials(f"key-{self.calls}", "secret").get_frozen_credentials()

    rotating = Rotating()
    assert [keys_of(rotating).access_key for _ in range(3)] == ["key-1", "key-2", "key-3"]


def _with(changed: dict[str, Any]) -> dict[str, Any]:
    keys = {"access_key_id": "AKIDEXAMPLE", "secret_access_key": "wJalrXUtnFEMI"}
    return {"bucket": "bucket", "region": "eu-west-3", **keys, **changed}
