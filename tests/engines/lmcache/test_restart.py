"""What one process stored, a fresh one finds: LMDB, NVMe and S3, through both doors of LMCache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed (make test-engines)")

from tests.engines.lmcache.adapter import NBYTES, Server, keys, memory
from tests.engines.lmcache.engine import CHUNK_TOKENS, content, lmdb
from tests.engines.lmcache.process import HASHES, PARTIAL, SHORT_TOKENS, digest
from tests.support_s3 import CREDENTIALS, make_bucket, moto_url

pytestmark = pytest.mark.engine

__all__ = ["moto_url"]

ROOT = Path(__file__).parents[3]
_LIMIT_S = 120


@pytest.fixture(params=["lmdb", "nvme", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "lmdb":
        return lmdb(tmp_path / "store")
    if request.param == "nvme":
        tier = {"backend": "nvme", "path": str(tmp_path / "store"), "capacity": "256MiB"}
        return {"l2": [tier]}
    url = request.getfixturevalue("moto_url")
    bucket = tmp_path.name.replace("_", "-")
    make_bucket(url, bucket)
    return {"l2": [{"backend": "s3", "bucket": bucket, "endpoint_url": url, "region": "us-east-1"} | CREDENTIALS]}


def fresh_process(config: dict[str, Any]) -> list[list[str | None]]:
    command = [sys.executable, "-m", "tests.engines.lmcache.process"]
    done = subprocess.run(
        command, input=json.dumps(config), capture_output=True, text=True, timeout=_LIMIT_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[str | None]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_fresh_process_loads_the_same_bytes_by_either_door(start: Any, config: dict[str, Any]) -> None:
    engine = start(config=config, lmcache=PARTIAL)
    engine.put(engine.keys(*HASHES), [engine.chunk(1), engine.chunk(2), engine.chunk(3, tokens=SHORT_TOKENS)])
    engine.stop()
    server = Server(config=config)
    assert server.store(keys(*HASHES), [memory(10 + i) for i in HASHES]).is_successful()
    server.adapter.close()

    by_connector, by_adapter = fresh_process(config)

    sizes = (NBYTES, NBYTES, NBYTES * SHORT_TOKENS // CHUNK_TOKENS)
    assert by_connector == [digest(content(n, i).numpy().tobytes()) for i, n in zip(HASHES, sizes, strict=True)]
    assert by_adapter == [digest(content(NBYTES, 10 + i).numpy().tobytes()) for i in HASHES]
