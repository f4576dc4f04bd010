"""A process that has imported everything and forks a fresh worker for each request.

Starting Python and torch anew takes seconds, a fork takes milliseconds.  The shim that makes files fail is loaded
into it from the start and does nothing until a worker attaches itself to a directory.  Requests come as JSON with two
descriptors: the worker's standard input and output, and its standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

PID, END, FAILED = "!pid ", "!end ", "!failed "
"""Lines of the forge itself, among those of the worker."""


def main(fd: int) -> None:
    """Serve until the other side goes away."""
    import boto3  # type: ignore[import-untyped]  # noqa: F401 - imported once for all workers
    import kvstore_zstd.hooks  # noqa: F401

    import tests.faults.media  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need no wait
    with socket.socket(fileno=fd) as link:
        link.send(b"ready")
        while True:
            data, fds, _, _ = socket.recv_fds(link, 1 << 20, 2)
            if not data:
                return
            if not os.fork():
                _supervise(json.loads(data), *fds)
            for one in fds:
                os.close(one)


def _supervise(request: dict[str, Any], talk: int, errors: int) -> None:
    """Run a worker and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        _live(request, talk, errors)
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    os.write(talk, f"{END}{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _output(fd: int) -> Any:
    return os.fdopen(fd, "w", closefd=False)  # an interpreter's own streams do not close theirs either


def _live(request: dict[str, Any], talk: int, errors: int) -> None:
    """Be the worker; returns or raises only when it shall end as any script does."""
    os.write(talk, f"{PID}{os.getpid()}\n".encode())
    for here, standard in ((talk, 0), (talk, 1), (errors, 2)):
        os.dup2(here, standard)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, "r", closefd=False), _output(1), _output(2)
    os.environ.update(request["env"])
    sys.argv = ["worker", *request["args"]]
    code = 0
    try:
        if request["shim"]:
            prefix, control = (text.encode() for text in request["shim"])
            assert ctypes.CDLL(None).iofault_attach(prefix, control) == 0
        exec(compile(request["code"], "<worker>", "exec"), {"__name__": "worker"})  # noqa: S102 - the test's own text
        if request["ends"]:
            return
    except BaseException:
        if request["ends"]:
            raise
        print(FAILED + json.dumps(traceback.format_exc()), flush=True)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
