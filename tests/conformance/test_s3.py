from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing import BackendConformance
from tests.support_s3 import CREDENTIALS, make_bucket, seaweedfs_url

__all__ = ["seaweedfs_url"]

pytestmark = pytest.mark.s3server


@pytest.fixture(autouse=True)
def no_aws_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The developer's own AWS files decide nothing, and no metadata server is asked."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def bucket(seaweedfs_url: str) -> str:
    make_bucket(seaweedfs_url, "conformance")
    return "conformance"


class TestS3(BackendConformance):
    plugin = "s3"
    usage_is_exact = False  # known as of the last listing
    absence_age_s = 4.0  # remembered for 2 s
    small_capacity_bytes = 3 << 20  # requests, not bytes, are what takes time here
    record_bytes = 32 << 10
    examples = 3

    @pytest.fixture
    def options(self, bucket: str, seaweedfs_url: str) -> dict[str, Any]:
        place = {"bucket": bucket, "prefix": f"conformance/{uuid.uuid4()}"}
        return {**place, "endpoint_url": seaweedfs_url, "region": "us-east-1", **CREDENTIALS}
