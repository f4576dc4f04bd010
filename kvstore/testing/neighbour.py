"""Another process with the same store open, told line by line what to do."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

_ANSWER_S: Final = 60.0  # a process start on a busy machine takes seconds


def environment() -> dict[str, str]:
    """Environment of a process that imports what this one can import."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class NeighbourError(Exception):
    """The other process died, hung, or something in it raised."""


class Neighbour:
    """A process that runs :mod:`kvstore.testing.child`; end it, or use it as a context manager."""

    def __init__(self, target: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        command = [sys.executable, "-W", "error", "-m", "kvstore.testing.child"]
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        self._pending = b""
        try:
            self.ask("open", target=dict(target), changes=dict(changes))
        except BaseException:
            self.end()
            raise

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a request without waiting for its answer."""
        stdin = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells more
            stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            stdin.flush()

    def answer(self) -> Any:
        """Wait for one answer.

        Raises:
            NeighbourError: It did not come; the message holds what the process printed.
        """
        line = self._line()
        if not line:
            if self.process.poll() is None:
                self.process.kill()
            _, error = self.process.communicate()
            msg = f"the other process ended with {self.process.returncode}:\n{error.decode(errors='replace')[-4000:]}"
            raise NeighbourError(msg)
        answer = json.loads(line)
        if "error" in answer:
            raise NeighbourError(str(answer["error"]))
        return answer["value"]

    def _line(self) -> bytes:
        """One line of output; empty when the process ended or took too long."""
        stdout = self.process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(_ANSWER_S):
                    return b""
                some = os.read(stdout.fileno(), 1 << 16)
                if not some:
                    return b""
                self._pending += some
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a request and return the answer."""
        self.tell(do, **arguments)
        return self.answer()

    def put(self, ids: Sequence[int | str], nbytes: int = 5000) -> list[str]:
        """Store records; the statuses' values."""
        return list(self.ask("put", ids=list(ids), nbytes=nbytes))

    def read(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Read records."""
        found = self.ask("read", names=[name.hex() for name in names])
        return [None if data is None else bytes.fromhex(data) for data in found]

    def delete(self, names: Sequence[bytes]) -> int:
        """Delete records; how many were there."""
        return int(self.ask("delete", names=[name.hex() for name in names]))

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        """Ask for an epoch."""
        return bytes.fromhex(self.ask("epoch", namespace=namespace.hex(), bump=bump))

    def kill(self) -> list[Any]:
        """Kill the process in the middle of whatever it does; returns the answers that had come by then."""
        self.process.kill()
        answers = []
        while line := self._line():
            answers.append(json.loads(line)["value"])
        self.end()
        return answers

    def end(self) -> None:
        """Let the process close its store and end; kills it when it does not."""
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        stdout.close()
        stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
