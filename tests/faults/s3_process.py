"""The misbehaving S3 server as a process of its own: it outlives writers that are killed, and shares no GIL with them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tests.faults.s3_faults import Fault, S3FaultServer, Stored

ROOT = Path(__file__).parents[2]


class S3Process:
    """Starts the server and tells it what to do, one JSON line a command.

    Args:
        bucket: Name of its only bucket.
    """

    def __init__(self, bucket: str) -> None:
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.faults.s3_process import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, bucket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._lock = threading.Lock()
        self.url: str = self.ask("url")

    def ask(self, do: str, **arguments: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def inject(self, *faults: Fault) -> None:
        """Replace all faults; none heals the server."""
        self.ask("inject", faults=[asdict(fault) for fault in faults])

    def close(self) -> None:
        self._process.kill()  # what it holds dies with it
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Objects(MutableMapping[str, Stored]):
    """The objects of the server's bucket."""

    def __init__(self, process: S3Process) -> None:
        self._process = process

    def __getitem__(self, key: str) -> Stored:
        found = self._process.ask("read", key=key)
        if found is None:
            raise KeyError(key)
        return Stored(bytes.fromhex(found))

    def __setitem__(self, key: str, stored: Stored) -> None:
        self._process.ask("write", key=key, body=stored.body.hex())

    def __delitem__(self, key: str) -> None:
        self._process.ask("remove", key=key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._process.ask("keys"))

    def __len__(self) -> int:
        return len(self._process.ask("keys"))


class _Commands:
    def __init__(self, server: S3FaultServer, bucket: str) -> None:
        self._server = server
        self._objects = server.buckets[bucket]

    def url(self) -> str:
        return self._server.url

    def keys(self) -> list[str]:
        return list(self._objects)

    def read(self, key: str) -> str | None:
        found = self._objects.get(key)
        return None if found is None else found.body.hex()

    def write(self, key: str, body: str) -> None:
        self._objects[key] = Stored(bytes.fromhex(body))

    def remove(self, key: str) -> None:
        del self._objects[key]

    def inject(self, faults: list[Mapping[str, Any]]) -> None:
        self._server.inject(*(Fault(**fault) for fault in faults))

    def latency(self, seconds: float) -> None:
        self._server.latency_s = seconds

    def heads(self, nbytes: int) -> dict[str, tuple[int, str]]:
        """Length and first bytes of every object."""
        return {key: (len(stored.body), stored.body[:nbytes].hex()) for key, stored in list(self._objects.items())}

    def requests(self) -> int:
        return len(self._server.log)


def serve() -> None:
    """Serve until the input ends."""
    with S3FaultServer(sys.argv[1]) as server:
        commands = _Commands(server, sys.argv[1])
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(getattr(commands, request.pop("do"))(**request)), flush=True)
