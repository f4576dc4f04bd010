"""The media that several processes can share, and how a config names each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support_s3 import CREDENTIALS

ROOT = Path(__file__).parents[2]
BUCKET = "kvcache"
FILES = ("lmdb", "segments", "tree")
SHARED = (*FILES, "s3")
NEEDS_A_SECOND = ("tree", "s3")
"""Media whose epoch and negative answers may be remembered for about a second."""


@dataclass(frozen=True)
class Place:
    """Where tests put stores: a directory, and the address of an S3 server."""

    root: Path
    s3_url: str = ""

    def tier(self, medium: str, name: str, **core: Any) -> dict[str, Any]:
        """The ``[[l2]]`` section of a store called ``name``; takes everything, uncompressed."""
        common = {"admit": "all", "codec": "none", "queue": "64MiB", "deadline": "20s", **core}
        path = str(self.root / f"{medium}-{name}")
        if medium == "memory":
            return {"backend": "memory", **common}
        if medium == "lmdb":
            return {"backend": "lmdb", "path": path, **common}
        if medium in {"segments", "tree"}:
            return {"backend": "nvme", "layout": medium, "path": path, **common}
        own = {"bucket": BUCKET, "prefix": f"stateful/{name}", "endpoint_url": self.s3_url, "region": "us-east-1"}
        return {"backend": "s3", **own, **CREDENTIALS, **common}

    def folder(self, medium: str, name: str) -> Path:
        """The directory of a file store."""
        return self.root / f"{medium}-{name}"


def taken_bytes(folder: Path) -> int:
    """Bytes that the files of a store take from the medium at this moment."""
    total = 0
    for parent, folders, files in os.walk(folder):  # passes over folders that are removed meanwhile
        for name in folders + files:
            try:
                total += Path(parent, name).lstat().st_blocks * 512
            except FileNotFoundError:  # published or evicted meanwhile
                continue
    return total


@contextmanager
def server_process() -> Iterator[str]:
    """An S3 server in memory with a bucket, in a process of its own, so that its memory is not the caller's."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.stateful.media import serve; serve()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def serve() -> None:
    """Run a server until the input ends."""
    from tests.faults.s3_faults import S3FaultServer

    with S3FaultServer(BUCKET) as server:
        print(server.url, flush=True)
        sys.stdin.read()
