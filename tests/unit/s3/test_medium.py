"""What every S3 server and both data paths must do alike."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import pytest
from kvstore_s3.medium import S3Medium

from kvstore.objects.medium import ObjectInfo
from tests.unit.s3.conftest import PATHS, opened
from tests.unit.s3.objects import call, drain, keys, read, write

SERVERS = ("healthy_url", "moto_bucket", pytest.param("seaweedfs_bucket", marks=pytest.mark.s3server))


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module", params=PATHS)
def shared(server: str, request: pytest.FixtureRequest) -> Iterator[S3Medium]:
    medium = opened(server, prefix=f"test/{uuid.uuid4().hex}", data_path=request.param)
    assert medium.describe()["data path"] == request.param
    yield medium
    medium.close()


@pytest.fixture
def store(shared: S3Medium) -> Iterator[S3Medium]:
    """A medium that is empty at the start of each test."""
    assert keys(shared) == []
    yield shared
    shared.remove(keys(shared), call())


def test_what_was_written_is_read(store: S3Medium) -> None:
    parts: list[memoryview | bytes] = [b"head", memoryview(os.urandom(70_000)), b"", memoryview(bytearray(b"tail"))]
    assert store.write("aa/k", parts, call(), once=False, blocks=16)
    assert read(store, "aa/k") == b"".join(parts)
    info = store.head("aa/k", call())
    assert info is not None
    assert (info.key, info.nbytes, info.blocks) == ("aa/k", 70_008, 16)
    assert abs(info.modified - time.time()) < 60
    body = store.read("aa/k", call())
    assert body is not None
    with body:
        assert body.modified == info.modified


@pytest.mark.parametrize("nbytes", [0, 1, 2047, 2048, 4096, 4097, 3 << 20])
def test_every_length_round_trips(store: S3Medium, nbytes: int) -> None:
    data = os.urandom(nbytes)
    write(store, "aa/k", data)
    assert read(store, "aa/k") == data


def test_an_absent_object_is_an_answer(store: S3Medium) -> None:
    assert read(store, "aa/none") is None
    assert store.head("aa/none", call()) is None
    store.remove(["aa/none"], call())
    store.refresh("aa/none", call())


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, None), (10, 20), (9_990, 20_000), (9_999, None), (0, 10_000), (5_000, 5_000)]
)
def test_a_range_is_cut_at_the_end(store: S3Medium, start: int, stop: int | None) -> None:
    data = os.urandom(10_000)
    write(store, "aa/k", data)
    assert read(store, "aa/k", start, stop) == data[start:stop]


def test_a_range_behind_the_end_is_empty(store: S3Medium) -> None:
    write(store, "aa/k", b"abc")
    assert read(store, "aa/k", 3) == b""
    assert read(store, "aa/k", 100, 200) == b""


def test_a_body_is_read_in_pieces(store: S3Medium) -> None:
    data = os.urandom(300_000)
    write(store, "aa/k", data)
    body = store.read("aa/k", call())
    assert body is not None
    got = bytearray(len(data))
    with body:
        for start, stop in ((0, 32), (32, 900), (900, 200_000), (200_000, 200_001), (200_001, 300_000)):
            body.read_into(memoryview(got)[start:stop])
    assert bytes(got) == data


def test_a_body_closed_early_costs_nothing_but_its_connection(store: S3Medium) -> None:
    write(store, "aa/k", os.urandom(1 << 20))
    write(store, "aa/small", b"small")
    for _ in range(20):  # more often than there are connections
        body = store.read("aa/k", call())
        assert body is not None
        body.close()
    assert read(store, "aa/small") == b"small"


def test_once_leaves_the_first_object(store: S3Medium) -> None:
    assert store.put_once
    assert write(store, "aa/k", b"first", once=True)
    assert not write(store, "aa/k", b"second", once=True)
    assert read(store, "aa/k") == b"first"
    assert write(store, "aa/k", b"third")
    assert read(store, "aa/k") == b"third"


def test_a_listing_shows_what_is_there(store: S3Medium) -> None:
    for key in ("aa/one", "aa/two", "bb/three"):
        write(store, key, key.encode(), blocks=4)
    assert keys(store) == ["aa/one", "aa/two", "bb/three"]
    (found,) = store.entries("bb/", call())
    assert found == ObjectInfo("bb/three", 8, found.modified, 0)
    assert abs(found.modified - time.time()) < 60


def test_removal_takes_many_and_absent_ones(store: S3Medium) -> None:
    for i in range(12):
        write(store, f"aa/{i}", b"x")
    store.remove([f"aa/{i}" for i in range(10)] + ["aa/none"], call())
    assert keys(store) == ["aa/10", "aa/11"]
    store.remove(["aa/10"], call())
    assert keys(store) == ["aa/11"]


def test_refresh_keeps_the_object_and_its_blocks(store: S3Medium) -> None:
    write(store, "aa/k", b"body", blocks=8)
    store.refresh("aa/k", call())
    info = store.head("aa/k", call())
    assert info is not None
    assert (info.nbytes, info.blocks) == (4, 8)
    assert read(store, "aa/k") == b"body"


def test_one_path_reads_what_the_other_wrote(server: str) -> None:
    prefix = f"test/{uuid.uuid4().hex}"
    media = {name: opened(server, prefix=prefix, data_path=name) for name in PATHS}
    try:
        data = os.urandom(100_000)
        for writer in PATHS:
            for reader in PATHS:
                write(media[writer], f"aa/{writer}", data, blocks=3)
                body = media[reader].read(f"aa/{writer}", call(), start=10)
                assert body is not None
                assert drain(body) == data[10:]
                assert media[reader].head(f"aa/{writer}", call()) == media[writer].head(f"aa/{writer}", call())
    finally:
        for medium in media.values():
            medium.close()


def test_reading_on_needs_the_bytes_to_be_there(store: S3Medium) -> None:
    write(store, "aa/k", b"12345678")
    body = store.read("aa/k", call(), stop=4)
    assert body is not None
    with body, pytest.raises(Exception, match="8 bytes wanted at 0 of a body of 4"):
        body.read_into(memoryview(bytearray(8)))
