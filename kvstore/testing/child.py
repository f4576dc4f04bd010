"""What the other process of a conformance suite runs: requests on stdin, answers on stdout, JSON lines."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Final

from kvstore.backend import Backend
from kvstore.errors import ClosedError
from kvstore.testing.samples import bytes_of, call, item_of, read
from kvstore.testing.store import Store, Target

_FORKED_S: Final = 20  # a fork that inherits a lock may wait for ever


class Child:
    """Answers requests about one store; each public method is one request."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._backend: Backend | None = None

    def run(self) -> None:
        """Answer until the requests end, then close."""
        for line in sys.stdin:
            request = json.loads(line)
            try:
                work: Callable[..., Any] = getattr(self, request.pop("do"))
                answer = {"value": work(**request)}
            except Exception as e:  # noqa: BLE001 - border: the other side decides what an error means
                answer = {"error": f"{type(e).__name__}: {e}\n{traceback.format_exc()}"}
            say(answer)
        if self._store is not None:
            self._store.close()

    @property
    def backend(self) -> Backend:
        """The opened backend."""
        assert self._backend is not None
        return self._backend

    def open(self, target: dict[str, Any], changes: dict[str, Any]) -> None:
        """Open the place."""
        aim = Target(**target)
        self._store = Store(aim, aim.registry())
        self._backend = self._store.open(**changes)

    def put(self, ids: list[int | str], nbytes: int) -> list[str]:
        """Store records."""
        statuses = self.backend.put_many([item_of(i, nbytes) for i in ids], call())
        return [status.value for status in statuses]

    def put_for_ever(self, nbytes: int, batch: int) -> None:
        """Store record after record, saying after each call which ones are safe; ends by a kill."""
        start = 0
        while True:
            ids = range(start, start + batch)
            self.put(list(ids), nbytes)
            say({"value": [ids.start, ids.stop]})
            start = ids.stop

    def read(self, names: list[str]) -> list[str | None]:
        """Read records."""
        found = read(self.backend, [bytes.fromhex(name) for name in names])
        return [None if data is None else data.hex() for data in found]

    def delete(self, names: list[str]) -> int:
        """Delete records."""
        return self.backend.delete_many([bytes.fromhex(name) for name in names], call())

    def epoch(self, namespace: str, *, bump: bool) -> str:
        """Ask for an epoch."""
        return self.backend.epoch(bytes.fromhex(namespace), bump=bump).hex()

    def usage(self) -> dict[str, int]:
        """Space taken."""
        found = self.backend.usage()
        return {"records": found.records, "payload_bytes": found.payload_bytes, "capacity_bytes": found.capacity_bytes}

    def fork(self, ident: int | str, nbytes: int) -> dict[str, str]:
        """Use the inherited backend and a new one in a forked child, then the own one again."""
        out, into = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tried here
            pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(_FORKED_S)
                inherited = self._try_read(self.backend, ident, nbytes)
                answer = {"inherited": inherited, "new": self._reopened(ident, nbytes)}
                os.write(into, json.dumps(answer).encode())
            finally:
                os._exit(0)
        os.close(into)
        with os.fdopen(out, "rb") as answered:
            text = answered.read()
        _, status = os.waitpid(pid, 0)
        if not text:
            return {"died": str(os.waitstatus_to_exitcode(status))}
        return {**json.loads(text), "own": self._try_read(self.backend, ident, nbytes)}

    def _reopened(self, ident: int | str, nbytes: int) -> str:
        assert self._store is not None
        backend = self._store.open()
        answer = self._try_read(backend, ident, nbytes)
        backend.close()
        return answer

    @staticmethod
    def _try_read(backend: Backend, ident: int | str, nbytes: int) -> str:
        try:
            (found,) = read(backend, [item_of(ident).name])
        except ClosedError:
            return "closed"
        except Exception as e:  # noqa: BLE001 - border: the law judges what came
            return repr(e)
        return "absent" if found is None else "good" if found == bytes_of(ident, nbytes) else "wrong bytes"


def say(answer: dict[str, Any]) -> None:
    """Write one answer."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Child().run()
