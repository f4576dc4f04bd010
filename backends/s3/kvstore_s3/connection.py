"""One HTTP/1.1 connection: gather-send, answers parsed in place, bodies received into the caller's memory.

Plain sockets stay blocking and carry their limit as ``SO_RCVTIMEO`` and ``SO_SNDTIMEO``: one
``recv`` with ``MSG_WAITALL`` then moves a whole body in one system call, and the kernel counts the
limit over the whole call, so that a trickling server cannot stretch it.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore_s3.errors import S3Error, Trouble

_SCRATCH_BYTES: Final = 4096  # heads of answers have 300 to 900 bytes; what follows them is copied once
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_GATHER: Final = 512  # half of Linux's IOV_MAX
_READ_AHEAD_BYTES: Final = 2048  # shorter reads go through the scratch buffer, which saves system calls
_TIMEVAL: Final = struct.Struct("@ll")
_NO_BODY: Final = frozenset({204, 304})
_MAX_DIGITS: Final = 18  # of a number in a header: more than any object has bytes, and no float or offset overflows


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to connect to.

    Attributes:
        host: Name or address.
        port: TCP port.
        tls: Context for TLS; None for plain HTTP.
        connect_timeout_s: For one address.
        silence_s: Longest time without a byte.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    connect_timeout_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Head of an answer.

    Attributes:
        status: HTTP status.
        headers: With lower-case names.
        nbytes: Length of the body; -1 when it is not told.
        keep: Whether the connection can carry another request once the body was read.
    """

    status: int
    headers: dict[str, str]
    nbytes: int
    keep: bool


class StaleError(Exception):
    """The server closed a kept connection before it saw the request; a new one will do."""


class Connection:
    """A connected socket; one thread at a time.

    Attributes:
        used: Whether an answer has come over it before.
    """

    __slots__ = ("_scratch", "_silence_s", "_sock", "_start", "_stop", "_timeout_s", "used")

    def __init__(self, endpoint: Endpoint, deadline: float) -> None:
        self.used = False
        self._silence_s: Final = endpoint.silence_s
        self._scratch: Final = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._stop = 0
        self._timeout_s = -1.0
        self._sock: Final = _connect(endpoint, deadline)

    @property
    def stale(self) -> bool:
        """Whether an idle connection was closed, or talks without being asked."""
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.settimeout(0)
                self._timeout_s = -1.0
                self._sock.recv_into(self._scratch)  # would swallow data, but idle connections carry none
            else:
                self._sock.recv_into(self._scratch, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        return True

    def send(self, head: bytes, buffers: Sequence[memoryview | bytes], deadline: float) -> None:
        """Send a request without joining its parts.

        Raises:
            OSError: The connection broke or the limit passed.
        """
        self._limit(deadline)
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.sendall(head)
            for buffer in buffers:
                self._limit(deadline)
                self._sock.sendall(buffer)
            return
        parts = [memoryview(head), *(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))]
        while parts:
            sent = self._sock.sendmsg(parts[:_MAX_GATHER])
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][sent:]
                self._limit(deadline)

    def answer(self, method: str, deadline: float) -> Answer:
        """Receive the head of the answer.

        Raises:
            StaleError: The connection ended before the first byte.
            OSError: It broke, or the limit passed.
            S3Error: What came is not HTTP.
        """
        while True:
            head = self._head(deadline)
            answer = _parse(head, method)
            if answer.status >= 200:
                self.used = True
                return answer

    def read_some(self, view: memoryview, deadline: float) -> int:
        """Receive the start of ``view``; 0 at the end of the connection.

        Raises:
            OSError: The connection broke or the limit passed.
        """
        if self._start == self._stop and view.nbytes < _READ_AHEAD_BYTES:
            self._limit(deadline)
            self._start, self._stop = 0, self._sock.recv_into(self._scratch)
        if self._start < self._stop:
            got = min(view.nbytes, self._stop - self._start)
            view[:got] = self._scratch[self._start : self._start + got]
            self._start += got
            return got
        self._limit(deadline)
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.recv_into(view)
        return self._sock.recv_into(view, view.nbytes, socket.MSG_WAITALL)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    @property
    def idle(self) -> bool:
        """Whether everything received was handed out."""
        return self._start == self._stop

    def _head(self, deadline: float) -> bytes:
        """Return everything before the empty line; what follows stays in the scratch buffer."""
        head = b""
        while True:
            if self._start == self._stop:
                self._limit(deadline)
                try:
                    self._start, self._stop = 0, self._sock.recv_into(self._scratch)
                except (ConnectionResetError, BrokenPipeError) as e:
                    raise StaleError(f"connection reset before the answer ({e.strerror})") from e
                if not self._stop:
                    raise StaleError("connection closed before the answer")
            piece = bytes(self._scratch[self._start : self._stop])
            end = (head + piece).find(b"\r\n\r\n")
            if end >= 0:
                self._start += end + 4 - len(head)
                return (head + piece)[:end]
            self._start = self._stop
            head += piece
            if len(head) > _MAX_HEAD_BYTES:
                raise S3Error(Trouble.FOREIGN, f"the answer's head has more than {_MAX_HEAD_BYTES} bytes")

    def _limit(self, deadline: float) -> None:
        """Let the next system call end at the deadline, or after ``silence_s`` without a byte."""
        left = min(deadline - time.monotonic(), self._silence_s)
        if left <= 0:
            raise TimeoutError
        # a limit that is a little too long is harmless, a system call before each read is not free
        if self._timeout_s >= left > 0.9 * self._timeout_s:
            return
        self._timeout_s = left
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.settimeout(left)
            return
        value = _TIMEVAL.pack(int(left), max(1, int(left % 1 * 1e6)))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _connect(endpoint: Endpoint, deadline: float) -> socket.socket:
    left = min(deadline - time.monotonic(), endpoint.connect_timeout_s)
    if left <= 0:
        raise TimeoutError
    sock = socket.create_connection((endpoint.host, endpoint.port), left)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if endpoint.tls is None:
            sock.settimeout(None)
            return sock
        return endpoint.tls.wrap_socket(sock, server_hostname=endpoint.host)
    except BaseException:
        sock.close()
        raise


def _parse(head: bytes, method: str) -> Answer:
    lines = head.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    number = header_number(rest[:3], -1)
    if not version.startswith("HTTP/1.") or number < 0:
        raise S3Error(Trouble.FOREIGN, f"the server does not speak HTTP/1.1: {lines[0][:80]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    length = header_number(headers.get("content-length", ""), -1)
    if method == "HEAD" or number < 200 or number in _NO_BODY:
        nbytes = 0
    else:
        nbytes = -1 if "transfer-encoding" in headers else length
    connection = headers.get("connection", "").lower()
    keep = nbytes >= 0 and (connection == "keep-alive" or (version == "HTTP/1.1" and "close" not in connection))
    return Answer(number, headers, nbytes, keep)


def header_number(text: str, default: int) -> int:
    """Read a number of a header; ``default`` for what is none, or none that anything has."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else default
