"""An S3 server that does as little as possible: what a client is measured against.

It keeps objects in memory, checks nothing, answers GET (with ranges), HEAD, PUT and DELETE, and can
add latency to every request.  Run it in a process of its own; it prints its port::

    python benchmarks/raw_s3_server.py [--latency-ms 30] [--link-mbit 1000]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import threading
import time

HEAD_BYTES = 16 << 10
PIECE_BYTES = 256 << 10  # of a throttled link: fine enough to share it between connections
OK = b'HTTP/1.1 200 OK\r\netag: "x"\r\ncontent-length: 0\r\n\r\n'
MISSING = b"<Error><Code>NoSuchKey</Code></Error>"


class Link:
    """Shares a bandwidth between all connections, by time stamps."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pass_through(self, nbytes: int) -> None:
        if not self.bytes_per_s:
            return
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + nbytes / self.bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


class RawServer:
    """One store behind a listening socket, one thread a connection."""

    def __init__(self, latency_s: float, link: Link) -> None:
        self.objects: dict[str, tuple[bytearray, bytes]] = {}
        self._arrivals: list[float] = []
        self._latency_s = latency_s
        self._link = link

    def serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            kept = b""
            while True:
                while (end := kept.find(b"\r\n\r\n")) < 0:
                    piece = connection.recv(HEAD_BYTES)
                    if not piece:
                        return
                    kept += piece
                head, kept = kept[:end].decode("latin-1"), kept[end + 4 :]
                kept = self._request(connection, head, kept)

    def _request(self, connection: socket.socket, head: str, kept: bytes) -> bytes:
        lines = head.split("\r\n")
        method, target, _ = lines[0].split(" ")
        fields = (line.partition(":") for line in lines[1:])
        headers = {name.lower(): value.strip() for name, _, value in fields}
        length = int(headers.get("content-length", "0"))
        body = bytearray(length)
        if length:
            if "expect" in headers:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            have = min(length, len(kept))
            body[:have] = kept[:have]
            kept = kept[have:]
            view = memoryview(body)[have:]
            while view:
                got = connection.recv_into(view, 0, socket.MSG_WAITALL)
                if not got:
                    raise ConnectionResetError
                view = view[got:]
        if not lines[0].startswith("GET /-/"):
            self._arrivals.append(time.monotonic())
        if self._latency_s:
            time.sleep(self._latency_s)
        self._answer(connection, method, target.partition("?")[0], headers, body)
        return kept

    def _answer(
        self, connection: socket.socket, method: str, path: str, headers: dict[str, str], body: bytearray
    ) -> None:
        if method == "PUT":
            self._link.pass_through(len(body))
            blocks = headers.get("x-amz-meta-kvstore-blocks", "0")
            self.objects[path] = (body, f"x-amz-meta-kvstore-blocks: {blocks}\r\n".encode())
            connection.sendall(OK)
        elif method == "DELETE":
            self.objects.pop(path, None)
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        elif path.count("/") == 1:  # the bucket itself
            connection.sendall(OK)
        elif path == "/-/rounds":
            self._send(connection, b"200 OK", b"", memoryview(b"%d %d" % self._rounds()))
        elif path not in self.objects:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(MISSING))
            if method != "HEAD":
                connection.sendall(MISSING)
        else:
            self._get(connection, method, path, headers.get("range", ""))

    def _rounds(self) -> tuple[int, int]:
        """Requests since this was asked last, and how many times somebody waited for answers in between."""
        arrivals, self._arrivals = sorted(self._arrivals), []
        rounds = sum(later - earlier > self._latency_s / 2 for earlier, later in itertools.pairwise(arrivals))
        return len(arrivals), rounds + bool(arrivals)

    def _get(self, connection: socket.socket, method: str, path: str, wanted: str) -> None:
        stored, extra = self.objects[path]
        view = memoryview(stored)
        status = b"200 OK"
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(view), len(view))
            extra += b"content-range: bytes %d-%d/%d\r\n" % (start, stop - 1, len(view))
            status, view = b"206 Partial Content", view[start:stop]
        self._send(connection, status, extra, view, body=method != "HEAD")

    def _send(
        self, connection: socket.socket, status: bytes, extra: bytes, view: memoryview, *, body: bool = True
    ) -> None:
        head = b'HTTP/1.1 %b\r\n%betag: "x"\r\ncontent-length: %d\r\n\r\n' % (status, extra, len(view))
        if not body:
            connection.sendall(head)
            return
        if not self._link.bytes_per_s:
            connection.sendmsg([head, view[:4096]])  # short enough to go out at once
            connection.sendall(view[4096:])
            return
        connection.sendall(head)
        for at in range(0, len(view), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            self._link.pass_through(len(piece))
            connection.sendall(piece)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added to every request")
    parser.add_argument("--link-mbit", type=float, default=0.0, help="bandwidth shared by all connections; 0: none")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        print(listener.getsockname()[1], flush=True)
        RawServer(arguments.latency_ms / 1e3, Link(arguments.link_mbit * 1e6 / 8)).serve(listener)


if __name__ == "__main__":
    main()
