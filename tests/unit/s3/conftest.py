"""Servers and media for the S3 tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from kvstore_s3.medium import S3Medium
from kvstore_s3.opening import open_bucket
from kvstore_s3.options import S3Options
from kvstore_s3.troubles import Troubles

from tests.faults.s3_faults import S3FaultServer
from tests.support_s3 import CREDENTIALS, make_bucket, moto_url, rclone_url, seaweedfs_url

__all__ = ["moto_url", "rclone_url", "seaweedfs_url"]

BUCKET = "bucket"
PATHS = ("boto3", "fast")
LOGGER = logging.getLogger("kvstore.test.s3")


@pytest.fixture(scope="session", autouse=True)
def no_aws_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The developer's own AWS files and variables decide nothing, and no metadata server is asked."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
            patch.delenv(name)
        none = str(tmp_path_factory.mktemp("aws") / "none")
        patch.setenv("AWS_CONFIG_FILE", none)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", none)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


def options(url: str | None, **changed: Any) -> S3Options:
    return S3Options(**{"bucket": BUCKET, "endpoint_url": url, **CREDENTIALS, **changed})


def opened(url: str | None, *, read_only: bool = False, **changed: Any) -> S3Medium:
    return open_bucket(options(url, **changed), tier="s3", read_only=read_only, logger=LOGGER)


@pytest.fixture(scope="session")
def fault_server() -> Iterator[S3FaultServer]:
    with S3FaultServer(BUCKET) as server:
        yield server


@pytest.fixture
def faulty(fault_server: S3FaultServer) -> Iterator[S3FaultServer]:
    """A server that misbehaves on demand; it has one bucket, empty."""
    fault_server.inject()
    fault_server.buckets = {BUCKET: {}}
    fault_server.log.clear()
    yield fault_server
    fault_server.inject()


@pytest.fixture(scope="session")
def opened_once(fault_server: S3FaultServer) -> Iterator[dict[str, S3Medium]]:
    media = {name: opened(fault_server.url, data_path=name) for name in PATHS}
    yield media
    for medium in media.values():
        medium.close()


@pytest.fixture(scope="session")
def healthy_url() -> Iterator[str]:
    """The same server, never made to misbehave."""
    with S3FaultServer(BUCKET) as server:
        yield server.url


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Name of a data path."""
    name: str = request.param
    return name


@pytest.fixture
def medium(faulty: S3FaultServer, opened_once: dict[str, S3Medium], path: str) -> S3Medium:
    """A medium on the faulty server, by either path, with counters of its own; the log is empty."""
    once = opened_once[path]
    troubles = Troubles("tier 's3'", LOGGER)
    medium = S3Medium(once._access, once._path, options(faulty.url), troubles, once=once.put_once)
    facts = medium.describe()
    assert (facts["data path"], facts["put once"], facts["requests"]) == (path, "yes", "0")
    return medium


@pytest.fixture(scope="session")
def moto_bucket(moto_url: str) -> str:
    """URL of moto's server, which has the bucket."""
    make_bucket(moto_url, BUCKET)
    return moto_url


@pytest.fixture(scope="session")
def seaweedfs_bucket(seaweedfs_url: str) -> str:
    """URL of SeaweedFS, which has the bucket."""
    make_bucket(seaweedfs_url, BUCKET)
    return seaweedfs_url
