"""A13: what is wrong with a bucket is told at open, and at run time counted and shown: never a mere miss."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.errors import BackendError, BackendPermissionError, ConfigError
from kvstore.types import BlockStatus, Presence
from tests.faults.media import S3Store, server_of
from tests.faults.s3_faults import Fault
from tests.faults.store import TIER, Store, over
from tests.support_faults import SMALL, WatchedCache, chain, noise, same, target, unrelated
from tests.support_s3 import CREDENTIALS

KEY, BLOCK = unrelated(0), noise(SMALL, [0])
SECRET = CREDENTIALS["secret_access_key"]


def troubles(cache: WatchedCache) -> dict[str, int]:
    """What the backend counted, by kind."""
    facts = cache._state.stack.tiers[0].tier.backend.describe()
    return {name: int(value) for name, value in facts.items() if value.isdecimal() and name != "requests"}


@pytest.mark.parametrize(
    ("option", "fault", "error", "told"),
    [
        ({"bucket": "no-such-bucket"}, None, ConfigError, ["'bucket'", "'no-such-bucket'", "does not exist"]),
        ({}, Fault("unknown_key"), BackendPermissionError, ["'faults'", "InvalidAccessKeyId"]),
        ({}, Fault("forbid"), BackendPermissionError, ["'faults'", "s3:ListBucket"]),
        ({}, Fault("skew"), BackendPermissionError, ["'faults'", "clock"]),
        ({}, Fault("expired"), BackendPermissionError, ["'faults'", "ExpiredToken"]),
        ({}, Fault("region", region="eu-south-9"), ConfigError, ["'region'", "'faults'", "'eu-south-9'"]),
    ],
    ids=["no-bucket", "unknown-key", "forbidden", "clock", "expired", "region"],
)
@over("S")
def test_what_is_wrong_with_a_bucket_is_told_at_open(
    store: Store, option: dict[str, Any], fault: Fault | None, error: type[Exception], told: list[str]
) -> None:
    with store.open() as cache:  # it is the fault, not the config
        cache.store(KEY, BLOCK)
    server_of(store).inject(*([fault] if fault is not None else []))
    message = told_at_open(store, error, **option)
    assert [text for text in told if text not in message] == []
    assert SECRET not in message


def told_at_open(store: Store, error: type[Exception], **option: Any) -> str:
    """What opening says, in time; the exception itself would keep what its frames hold."""
    began = time.monotonic()
    try:
        store.open(**option).close()
    except error as e:
        assert time.monotonic() - began < 5.0
        return str(e)
    raise AssertionError("the cache was opened")


@over("S")
def test_absent_credentials_are_told_at_open(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(store.root / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(store.root / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    told = told_at_open(store, BackendPermissionError, access_key_id=None, secret_access_key=None)
    assert "'faults'" in told
    assert "no credentials" in told
    assert server_of(store).requests() == []


@pytest.mark.parametrize("mode", ["unknown_key", "error500"])
@over("S")
def test_a_tier_that_is_not_required_opens_degraded_and_comes_back(
    store: Store, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.opening.FIRST_RETRY_S", 0.5)  # half a minute otherwise
    server_of(store).inject(Fault(mode))
    told_at_open(store, BackendError)
    with store.open(l1="1MiB", required=False) as cache:
        assert cache.health().state == "degraded"
        assert cache.health().tiers[TIER].state == "down"
        cache.put(KEY, BLOCK)
        found = cache.fetch(KEY)
        assert found is not None  # from L1
        assert same(found, BLOCK)
        server_of(store).inject()
        deadline = time.monotonic() + 20
        while cache.health().tiers[TIER].state == "down" and time.monotonic() < deadline:
            cache.fetch(KEY)
            time.sleep(0.05)
        assert cache.health().tiers[TIER].state == "ok"
        cache.store(unrelated(1), noise(SMALL, [1]))
        assert store.find(unrelated(1)[0]) is not None


@contextmanager
def bucket_gone(store: Store) -> Iterator[None]:
    """HEADs then answer 404 without a word, GETs NoSuchBucket."""
    buckets = server_of(store).buckets
    kept = buckets.pop(S3Store.BUCKET)
    yield
    buckets[S3Store.BUCKET] = kept


@contextmanager
def refused(store: Store, mode: str) -> Iterator[None]:
    with server_of(store).faulty(Fault(mode)):
        yield


@pytest.mark.parametrize(
    ("mode", "counter", "words"),
    [
        ("gone", "config_errors", "NoSuchBucket"),
        ("forbid", "auth_denied", "AccessDenied"),
        ("unknown_key", "auth_denied", "InvalidAccessKeyId"),
        ("skew", "clock_skew", "clock"),
        ("region", "config_errors", "eu-south-9"),
        ("expired", "expired_credentials", "ExpiredToken"),
    ],
)
@over("S")
def test_what_goes_wrong_while_open_is_no_mere_miss(
    store: Store, mode: str, counter: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with store.open(negative_ttl=0.0, positive_ttl=0.0) as cache:
        cache.store(KEY, BLOCK)
        caplog.clear()
        with bucket_gone(store) if mode == "gone" else refused(store, mode), caplog.at_level(logging.WARNING):
            for i in (0, 5, 6):  # one that is stored, two that are not
                assert cache.get_each(unrelated(i), target(SMALL)) == [BlockStatus.UNAVAILABLE]
                looked = cache.contains_each(unrelated(i))
                assert looked == [Presence.ABSENT if mode == "gone" else Presence.UNKNOWN]  # a bare 404 says no more
            cache.store(unrelated(9), noise(SMALL, [9]))
        health = cache.health()
        counters = cache.tier(TIER).counters
        assert troubles(cache)[counter] >= 2
        assert counters.misses == 3
        assert counters.io_errors + counters.rejected_by_breaker >= (3 if mode == "gone" else 6)  # reads and looks
        assert counters.refused_medium == 1
        assert health.state in {"degraded", "down"}
        assert words in health.tiers[TIER].detail + caplog.text
        lines = [r.message for r in caplog.records if r.levelno >= logging.WARNING and f"({counter}" in r.message]
        assert len(lines) == 1, lines
        assert SECRET not in caplog.text
        assert_recovers(cache)


def assert_recovers(cache: WatchedCache) -> None:
    """Without a restart; a suspended tier is tried again after a second, later after two, four ..."""
    deadline = time.monotonic() + 10
    while (found := cache.fetch(KEY)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found is not None
    assert same(found, BLOCK)
    assert cache.fetch(unrelated(9)) is None
    cache.store(unrelated(9), noise(SMALL, [9]))


@over("S")
def test_absent_keys_that_answer_403_to_head_are_absent(store: Store) -> None:
    with store.open(negative_ttl=0.0, positive_ttl=0.0) as cache:
        cache.store(KEY, BLOCK)
        with server_of(store).faulty(Fault("forbid", ("HEAD",))):
            assert cache.contains_each(unrelated(5)) == [Presence.ABSENT]
            assert cache.get_each(unrelated(5), target(SMALL)) == [BlockStatus.ABSENT]
            assert cache.lookup(chain(20, seed=13)).blocks == 0
            assert cache.contains_each(KEY) == [Presence.PRESENT]
            found = cache.fetch(KEY)
        assert found is not None
        assert same(found, BLOCK)
        assert troubles(cache)["auth_denied"] >= 1
        assert cache.tier(TIER).counters.io_errors == 0
        assert cache.health().state == "ok"


@pytest.mark.parametrize("data_path", ["fast", "boto3"])
@over("S")
def test_an_expired_token_is_renewed_and_costs_one_retry(store: Store, data_path: str) -> None:
    with store.open(data_path=data_path) as cache:
        cache.store(KEY, BLOCK)
        with server_of(store).faulty(Fault("expired", ("GET",), times=1, only=store.at(KEY))):
            found = cache.fetch(KEY)
            assert len(server_of(store).requests("GET", store.at(KEY))) == 2
        assert found is not None
        assert same(found, BLOCK)
        assert troubles(cache)["expired_credentials"] == 1
        assert cache.tier(TIER).counters.io_errors == 0
