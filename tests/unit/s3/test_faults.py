"""A server that misbehaves: every fault ends in time, in the right class, with its own counter (A11-A13)."""

from __future__ import annotations

import os
import time

import pytest
from kvstore_s3.medium import S3Medium

from kvstore.errors import (
    BackendError,
    BackendFullError,
    BackendPermissionError,
    BackendTimeoutError,
    BackendUnavailableError,
)
from tests.faults.s3_faults import Fault, S3FaultServer
from tests.unit.s3.conftest import opened
from tests.unit.s3.objects import call, drain, read, write

BLOCK = os.urandom(200_000)


@pytest.fixture
def stored(medium: S3Medium, faulty: S3FaultServer) -> S3Medium:
    write(medium, "aa/k", BLOCK)
    write(medium, "aa/other", os.urandom(len(BLOCK)))
    faulty.log.clear()
    return medium


@pytest.mark.parametrize("mode", ["truncate", "reset"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99999])
def test_a_broken_body_is_completed_by_a_second_get(
    stored: S3Medium, faulty: S3FaultServer, mode: str, fraction: float
) -> None:
    faulty.inject(Fault(mode, ("GET",), times=1, fraction=fraction))
    assert read(stored, "aa/k") == BLOCK
    assert len(faulty.requests("GET", "aa/k")) == 2
    assert read(stored, "aa/k", 1000, 50_000) == BLOCK[1000:50_000]


@pytest.mark.parametrize("mode", ["truncate", "reset"])
def test_a_body_that_always_breaks_is_unavailable_after_two_gets(
    stored: S3Medium, faulty: S3FaultServer, mode: str
) -> None:
    faulty.inject(Fault(mode, ("GET",)))
    with pytest.raises(BackendUnavailableError):
        read(stored, "aa/k")
    assert len(faulty.requests("GET", "aa/k")) == 2
    assert int(stored.describe()["broken_bodies"]) == 2
    faulty.inject()
    assert read(stored, "aa/k") == BLOCK  # nothing was deleted for it


def test_the_rest_must_be_of_the_same_object(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("truncate", ("GET",), times=1, fraction=0.3))
    body = stored.read("aa/k", call())
    assert body is not None
    write(stored, "aa/k", os.urandom(len(BLOCK)))
    with pytest.raises(BackendUnavailableError):
        drain(body)


def test_a_trickling_body_ends_at_the_deadline(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("trickle", ("GET",), fraction=0.1))
    began = time.monotonic()
    body = stored.read("aa/k", call(0.5))
    assert body is not None
    with body, pytest.raises(BackendTimeoutError):
        body.read_into(memoryview(bytearray(len(BLOCK))))
    assert time.monotonic() - began < 1.5


def test_a_server_without_ranges_is_understood(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("no_ranges", ("GET",)))
    assert read(stored, "aa/k", 1000, 60_000) == BLOCK[1000:60_000]
    assert read(stored, "aa/k", 100_000) == BLOCK[100_000:]
    assert read(stored, "aa/k", 0, 10) == BLOCK[:10]


def test_a_page_instead_of_an_answer_is_an_error_of_the_tier(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("html200"))
    for ask in (
        lambda: read(stored, "aa/k"),
        lambda: stored.head("aa/k", call()),
        lambda: write(stored, "aa/k", BLOCK),
    ):
        with pytest.raises(BackendUnavailableError, match="text/html"):
            ask()
    assert stored.describe()["foreign_answers"] == "3"


@pytest.mark.parametrize(
    ("mode", "error", "counter", "requests"),
    [
        ("slow_down", BackendUnavailableError, "throttled", 2),
        ("error500", BackendUnavailableError, "server_errors", 2),
        ("forbid", BackendPermissionError, "auth_denied", 1),
        ("bucket404", BackendUnavailableError, "config_errors", 1),
        ("skew", BackendPermissionError, "clock_skew", 1),
        ("full", BackendFullError, "full", 1),
    ],
)
def test_a_refused_get_has_its_class_and_counter(
    stored: S3Medium, faulty: S3FaultServer, mode: str, error: type[BackendError], counter: str, requests: int
) -> None:
    faulty.inject(Fault(mode))
    with pytest.raises(error, match="bucket 'bucket'"):
        read(stored, "aa/k")
    assert len(faulty.requests("GET", "aa/k")) == requests
    assert int(stored.describe()[counter]) == requests
    with pytest.raises(error):
        write(stored, "aa/new", BLOCK)
    faulty.inject()
    assert read(stored, "aa/new") is None
    assert read(stored, "aa/k") == BLOCK


def test_a_bucket_in_another_region_is_named(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("region"))
    with pytest.raises(BackendUnavailableError, match=r"PermanentRedirect.*eu-south-9"):
        read(stored, "aa/k")
    assert stored.describe()["config_errors"] == "1"
    assert len(faulty.requests("GET", "aa/k")) <= 2  # boto3 looks for itself in the other region


def test_a_throttled_request_is_tried_once_more(stored: S3Medium, faulty: S3FaultServer) -> None:
    for verb in ("GET", "PUT", "HEAD"):
        faulty.inject(Fault("slow_down", (verb,), times=1))
        assert read(stored, "aa/k") == BLOCK
        assert write(stored, "aa/k", BLOCK)
        assert stored.head("aa/k", call()) is not None


def test_each_kind_of_failure_is_logged_once(
    stored: S3Medium, faulty: S3FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.inject(Fault("bucket404"))
    for _ in range(5):
        with pytest.raises(BackendUnavailableError):
            read(stored, "aa/k")
    faulty.inject(Fault("skew"))
    for _ in range(5):
        with pytest.raises(BackendPermissionError):
            write(stored, "aa/k", BLOCK)
    assert [record.message.count("config_errors") for record in caplog.records] == [1, 0]
    assert "clock_skew" in caplog.records[1].message


def test_a_head_that_is_denied_for_absent_keys_is_answered_by_a_get(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("forbid", ("HEAD",)))
    assert stored.head("aa/none", call()) is None
    assert stored.head("aa/none2", call()) is None
    found = stored.head("aa/k", call())
    assert found is not None
    assert (found.nbytes, found.blocks) == (len(BLOCK), 1)
    assert len(faulty.requests("HEAD")) == 1
    assert stored.describe()["auth_denied"] == "1"


def test_an_expired_token_is_renewed_once(stored: S3Medium, faulty: S3FaultServer, path: str) -> None:
    medium = opened(faulty.url, data_path=path)  # its own: credentials are asked for again every few seconds only
    faulty.log.clear()
    faulty.inject(Fault("expired", ("GET",), times=1))
    assert read(medium, "aa/k") == BLOCK
    assert len(faulty.requests("GET", "aa/k")) == 2
    faulty.inject(Fault("expired", ("GET",)))
    for _ in range(3):
        with pytest.raises(BackendPermissionError):
            read(medium, "aa/k")
    assert len(faulty.requests("GET", "aa/k")) == 5
    medium.close()


def test_a_hung_server_ends_at_the_limit(faulty: S3FaultServer, path: str) -> None:
    medium = opened(faulty.url, data_path=path, read_timeout=0.3)
    faulty.inject(Fault("hang"))
    for seconds in (5.0, 0.1):  # the server's silence ends the first, the deadline the second
        began = time.monotonic()
        with pytest.raises(BackendTimeoutError):
            medium.read("aa/k", call(seconds))
        assert time.monotonic() - began < 2.0
    faulty.inject()
    medium.close()


def test_the_fast_path_keeps_any_deadline(faulty: S3FaultServer) -> None:
    medium = opened(faulty.url, data_path="fast")
    faulty.inject(Fault("hang"))
    for ask in (lambda: medium.read("aa/k", call(0.2)), lambda: medium.head("aa/k", call(0.2))):
        began = time.monotonic()
        with pytest.raises(BackendTimeoutError):
            ask()
        assert time.monotonic() - began < 1.0  # boto3 would wait for read_timeout, 2 s
    faulty.inject()
    medium.close()


def test_a_dead_server_is_unavailable_and_comes_back(stored: S3Medium, faulty: S3FaultServer) -> None:
    port = int(faulty.url.rpartition(":")[2])
    faulty.stop()
    began = time.monotonic()
    with pytest.raises(BackendUnavailableError):
        read(stored, "aa/k")
    assert time.monotonic() - began < 1.5
    faulty.start(port)
    assert read(stored, "aa/k") == BLOCK


def test_connections_closed_while_idle_cost_no_error(stored: S3Medium, faulty: S3FaultServer) -> None:
    before = stored.describe()
    for _ in range(3):
        faulty.close_idle()
        assert read(stored, "aa/k") == BLOCK
        faulty.close_idle()
        assert write(stored, "aa/k", BLOCK)
    assert stored.describe().keys() == before.keys()  # no counter appeared


def test_a_connection_dropped_without_an_answer_is_tried_again(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("drop", ("GET",), times=1))
    assert read(stored, "aa/k") == BLOCK


def test_a_call_past_its_deadline_sends_nothing(stored: S3Medium, faulty: S3FaultServer) -> None:
    with pytest.raises(BackendTimeoutError):
        stored.read("aa/k", call(0.0))
    cancelled = call()
    cancelled.cancel()
    with pytest.raises(BackendTimeoutError):
        stored.head("aa/k", cancelled)
    assert faulty.requests() == []
    assert stored.describe()["timeouts"] == "1"  # giving up is no failure


def test_batch_deletes_fall_back_to_single_ones(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("not_implemented", ("POST",)))
    stored.remove(["aa/k", "aa/other"], call())
    assert faulty.buckets["bucket"] == {}
    assert len(faulty.requests("DELETE")) == 2
    write(stored, "aa/1", b"x")
    write(stored, "aa/2", b"x")
    stored.remove(["aa/1", "aa/2"], call())
    assert len(faulty.requests("POST")) == 1  # it is not asked again


def test_a_body_without_a_length_is_refused(stored: S3Medium, faulty: S3FaultServer) -> None:
    faulty.inject(Fault("chunked", ("GET",)))
    with pytest.raises(BackendUnavailableError):
        read(stored, "aa/k")
