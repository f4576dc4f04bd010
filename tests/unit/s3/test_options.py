"""A wrong option is named with its value before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config import load_config
from kvstore.errors import ConfigError
from tests.unit.s3.conftest import options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket", ""),
        ("bucket", "bucket/folder"),
        ("prefix", "/a"),
        ("bucket", "kv"),
        ("bucket", "x" * 64),
        ("prefix", "a/"),
        ("prefix", "a//b"),
        ("prefix", "a/../b"),
        ("prefix", "ä"),
        ("prefix", "a b"),
        ("prefix", "x" * 257),
        ("endpoint_url", "127.0.0.1:9000"),
        ("endpoint_url", "ftp://host"),
        ("endpoint_url", "http://"),
        ("endpoint_url", "http://host:port"),
        ("endpoint_url", "http://host/?query"),
        ("pack", 3),
        ("pack", 32),
        ("pack", 0),
        ("connections", 0),
        ("connections", 1000),
        ("attempts", 0),
        ("connect_timeout", 0.0),
        ("read_timeout", 61.0),
        ("negative_ttl", -1.0),
        ("refresh_after", -1.0),
        ("sse_kms_key_id", "key"),
        ("session_token", "t"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    blank: dict[str, Any] = {"access_key_id": None, "secret_access_key": None} if name == "session_token" else {}
    with pytest.raises(ConfigError, match=f"'{name}'"):
        options(None, **blank, **{name: value})


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"prefix": ""},
        {"prefix": "a/b=1/c_d-e.f"},
        {"endpoint_url": "https://[::1]:9000/base"},
        {"bucket": "arn:aws:s3:us-west-2:123456789012:accesspoint/mine"},
        {"sse": "aws:kms", "sse_kms_key_id": "key"},
        {"pack": 1, "attempts": 1, "refresh_after": 0.0, "negative_ttl": 0.0},
    ],
)
def test_right_values_pass(changed: dict[str, Any]) -> None:
    assert {name: getattr(options(None, **changed), name) for name in changed} == changed


def test_half_a_pair_of_keys_is_refused_without_showing_it() -> None:
    for missing in ("access_key_id", "secret_access_key"):
        with pytest.raises(ConfigError, match=missing) as caught:
            options(None, **{missing: None})
        assert "kvstore-test" not in str(caught.value)


def test_a_password_in_the_url_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="endpoint_url") as caught:
        options("http://user:hunter2@host:9000")
    assert "hunter2" not in str(caught.value)


def test_a_config_file_with_a_wrong_value_is_refused_before_anything_is_opened() -> None:
    tier = {"backend": "s3", "bucket": "kv-cache", "secret_access_key": "hunter2"}
    with pytest.raises(ConfigError, match="access_key_id") as caught:
        load_config({"l2": [tier]})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"'pack': got 3; expected 1, 2, 4, 8 or 16"):
        load_config({"l2": [{"backend": "s3", "bucket": "kv-cache", "pack": 3}]})


def test_a_config_section_becomes_options() -> None:
    tier = {"backend": "s3", "bucket": "kv-cache", "endpoint_url": "http://127.0.0.1:9000", "read_timeout": "500ms"}
    (loaded,) = load_config({"l2": [tier]}).l2
    assert loaded.options.bucket == "kv-cache"
    assert loaded.options.read_timeout == 0.5
    assert (loaded.admit, loaded.deadline) == ("hot", 2.0)
