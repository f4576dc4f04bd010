"""Processes that use a store; how they ended is judged before anything they said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.faults.forge import END, FAILED, PID
from tests.faults.store import Store
from tests.support_faults import FaultSwitch

ROOT = Path(__file__).parents[2]
PRELUDE = f"""
import json, os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from kvstore import BlockStatus, KVCache, KVCacheKey, Namespace
from kvstore.types import Presence
from tests.faults.media import *
from tests.faults.store import *
from tests.support_faults import *
STORE, ARGS = load(sys.argv[1]), sys.argv[2:]
"""


class Shim(NamedTuple):
    """Files below ``prefix`` fail as the control file says."""

    prefix: Path
    control: Path

    @property
    def switch(self) -> FaultSwitch:
        return FaultSwitch(self.control)


def prepared(code: str) -> str:
    """A program around ``code``, for which ``STORE`` and ``ARGS`` are defined."""
    return PRELUDE + textwrap.dedent(code)


def run(
    code: str,
    store: Store,
    *,
    env: Mapping[str, str],
    flags: tuple[str, ...] = (),
    cwd: Path = ROOT,
    wrapper: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> Any:
    """Run a process that starts from nothing to its end; returns the JSON of its last line of output.

    ``wrapper`` is a command line to run it under, such as one that limits its memory.
    """
    done = subprocess.run(
        [*wrapper, sys.executable, *flags, "-c", prepared(code), store.to_json()],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **env},
        cwd=cwd,
    )
    assert_well_ended(done.returncode, done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def assert_well_ended(code: int, errors: str) -> None:
    how = signal.Signals(-code).name if code < 0 else f"return code {code}"
    assert code == 0, f"died: {how}\n{errors[-3000:]}"
    assert "Traceback" not in errors, errors[-3000:]


class Worker:
    """A process that runs code with ``STORE`` and ``ARGS`` and talks by lines."""

    def __init__(self, talk: socket.socket, errors: Any) -> None:
        self._said, self._tell = talk.makefile("r"), talk.makefile("w")
        self._errors = errors
        self.exit_code: int | None = None
        self.pid = int(self._said.readline().removeprefix(PID))

    def line(self) -> str:
        """The next line it says; empty when it has ended."""
        said = self._said.readline() if self.exit_code is None else ""
        text, end, code = said.partition(END)  # killed in the middle of a line it leaves a part of it
        if end:
            self.exit_code = int(code)
            return ""
        assert not text.startswith(FAILED), json.loads(text.removeprefix(FAILED))
        return text.rstrip("\n")

    def lines(self) -> Iterator[str]:
        """Lines until it ends."""
        while said := self.line():
            yield said

    def tell(self, text: str) -> None:
        self._tell.write(text + "\n")
        self._tell.flush()

    def kill(self) -> None:
        """End it at once, wherever it is."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, and nobody has read that yet
                os.kill(self.pid, signal.SIGKILL)

    @property
    def errors(self) -> str:
        """What it wrote to standard error."""
        self._errors.seek(0)
        return str(self._errors.read())

    def result(self) -> Any:
        """Wait for its good end; returns the JSON of its last line."""
        said = list(self.lines())
        assert self.exit_code is not None
        assert_well_ended(self.exit_code, self.errors)
        return json.loads(said[-1]) if said else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        while self.exit_code is None and (said := self._said.readline()):
            if END in said:
                self.exit_code = int(said.partition(END)[2])
        for one in (self._said, self._tell, self._errors):
            one.close()


class Forge:
    """The process that makes workers.

    Args:
        library: The shim to load into it; None where it cannot be built.
    """

    def __init__(self, library: Path | None) -> None:
        self._link, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.faults.forge", str(there.fileno())],
                pass_fds=[there.fileno()],
                cwd=ROOT,
                env={**os.environ, **({"LD_PRELOAD": str(library)} if library else {})},
            )
        assert self._link.recv(16) == b"ready"

    def start(
        self,
        code: str,
        store: Store,
        *args: object,
        shim: Shim | None = None,
        env: Mapping[str, str] | None = None,
        ends: bool = False,
    ) -> Worker:
        """Start a worker; with a shim, files fail for it, with ``ends`` it ends as any script does."""
        if shim is not None:
            FaultSwitch.make(shim.control)
        request = {
            "code": prepared(code),
            "args": [store.to_json(), *map(str, args)],
            "shim": None if shim is None else [str(shim.prefix), str(shim.control)],
            "env": dict(env or {}),
            "ends": ends,
        }
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the worker closes it
        here, there = socket.socketpair()
        with here, there:
            socket.send_fds(self._link, [json.dumps(request).encode()], [there.fileno(), errors.fileno()])
            there.close()
            return Worker(here, errors)

    def work(self, code: str, store: Store, *args: object, shim: Shim | None = None) -> Any:
        """Run a worker to its good end; returns the JSON of its last line of output."""
        with self.start(code, store, *args, shim=shim) as worker:
            return worker.result()

    def close(self) -> None:
        self._link.close()
        self._process.wait(10)
