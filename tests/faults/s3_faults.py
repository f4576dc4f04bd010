"""An S3 server in memory that misbehaves on demand, for what well-behaved test servers cannot do.

It speaks enough S3 for kvstore: objects with ranges, conditions and user metadata, HEAD, copies,
single and batch deletes, listings in pages, buckets.  ``server.inject(Fault(...))`` makes requests
go wrong; ``server.log`` shows what arrived.  It checks no signatures: the real servers do.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ERRORS: dict[str, tuple[int, str]] = {
    "slow_down": (503, "SlowDown"),
    "error500": (500, "InternalError"),
    "forbid": (403, "AccessDenied"),
    "unknown_key": (403, "InvalidAccessKeyId"),
    "bucket404": (404, "NoSuchBucket"),
    "expired": (400, "ExpiredToken"),
    "skew": (403, "RequestTimeTooSkewed"),
    "not_implemented": (501, "NotImplemented"),
    "full": (507, "XMinioStorageFull"),
    "region": (301, "PermanentRedirect"),
}
"""Modes that answer with an error document; a HEAD gets the status alone."""


@dataclass
class Fault:
    """What goes wrong, with which requests, how often.

    Modes besides :data:`ERRORS`: ``hang`` (accept, never answer), ``html200`` (a page instead of an
    answer), ``truncate`` (a body cut at ``fraction``), ``reset`` (the same with a TCP reset),
    ``trickle`` (a body at one byte per 20 ms), ``flip`` (one bit at ``fraction``), ``wrong_object``
    (another object's body), ``chunked`` (a body without a length), ``no_ranges`` (ranges are
    ignored), ``ignore_conditions`` (If-None-Match is), ``drop`` (close the connection unanswered),
    ``refuse_unsigned`` and ``refuse_checksums`` (400 for such requests).
    """

    mode: str
    methods: tuple[str, ...] = ("GET", "HEAD", "PUT", "POST", "DELETE")
    times: int | None = None
    fraction: float = 0.5
    region: str = "eu-south-9"
    only: str = ""
    """Part of the path; a fault meets only requests that have it."""


@dataclass(frozen=True)
class Logged:
    """One request as it arrived."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    at: float
    connection: int


@dataclass
class Stored:
    """One object."""

    body: bytes
    metadata: dict[str, str] = field(default_factory=dict)
    content_type: str = "binary/octet-stream"
    modified: float = field(default_factory=time.time)

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.body, usedforsecurity=False).hexdigest()}"'


class S3FaultServer:
    """Serves buckets from memory on a loopback port; use as a context manager."""

    def __init__(self, *buckets: str, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.log: list[Logged] = []
        self.latency_s = 0.0
        self.released = threading.Event()
        self.lock = threading.Lock()
        self._faults: list[Fault] = []
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._server.server_address[1]}"

    def inject(self, *faults: Fault) -> None:
        """Replace all faults; none heals the server."""
        with self.lock:
            self._faults = list(faults)

    @contextlib.contextmanager
    def faulty(self, *faults: Fault) -> Iterator[None]:
        """Misbehave within a block, with an empty log at its start."""
        self.log.clear()
        self.inject(*faults)
        try:
            yield
        finally:
            self.inject()

    def matching(self, method: str, path: str) -> Fault | None:
        """Take the fault that meets a request, once."""
        with self.lock:
            for fault in self._faults:
                if method in fault.methods and fault.only in path and fault.times != 0:
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def requests(self, method: str = "", part: str = "") -> list[Logged]:
        """What arrived, filtered."""
        return [entry for entry in self.log if entry.method.startswith(method) and part in entry.path]

    def start(self, port: int = 0) -> None:
        self.released.clear()
        self._server = _Server(("127.0.0.1", port), self)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Close the listening socket and all connections."""
        self.released.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.close_connections()
            self._server.server_close()

    def close_idle(self) -> None:
        """Close all connections, as servers do with idle ones."""
        assert self._server is not None
        self._server.close_connections()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], s3: S3FaultServer) -> None:
        self.s3 = s3
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)
        if s3.tls is not None:
            self.socket = s3.tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Clients go away in the middle of an answer: that is the point."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _Server
    clock_ahead_s = 0.0

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((timestamp or time.time()) + self.clock_ahead_s)

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - names of http.server

    def _serve(self) -> None:
        s3, parts = self.server.s3, urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        if len(body := self.rfile.read(length)) < length:
            return  # the client died: no server keeps half of a body
        headers = {name.lower(): value for name, value in self.headers.items()}
        s3.log.append(Logged(self.command, unquote(parts.path), parts.query, headers, time.time(), id(self.connection)))
        if s3.latency_s:
            s3.released.wait(s3.latency_s)
        fault = s3.matching(self.command, unquote(parts.path))
        if fault is not None and self._refused(fault, headers):
            return
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if bucket not in s3.buckets and not (self.command == "PUT" and not key):
            self._error(404, "NoSuchBucket")
        elif not key:
            self._bucket(bucket, query, body)
        else:
            self._object(s3.buckets[bucket], key, headers, body, fault)

    def _refused(self, fault: Fault, headers: dict[str, str]) -> bool:
        """Answer with an error, or not at all, where the fault says so."""
        if fault.mode in ERRORS:
            extra = {"x-amz-bucket-region": fault.region} if fault.mode == "region" else {}
            self.clock_ahead_s = 3600.0 if fault.mode == "skew" else 0.0
            self._error(*ERRORS[fault.mode], extra)
        elif fault.mode == "html200":
            self._answer(200, b"<html><body>Please log in</body></html>", {"Content-Type": "text/html"})
        elif fault.mode == "hang":
            self.server.s3.released.wait(30)
            self.close_connection = True
        elif fault.mode == "drop":
            self.close_connection = True
        elif (
            fault.mode == "refuse_unsigned"
            and self.command == "PUT"
            and headers.get("x-amz-content-sha256") == "UNSIGNED-PAYLOAD"
        ):
            self._error(400, "XAmzContentSHA256Mismatch")
        elif fault.mode == "refuse_checksums" and any("checksum" in name for name in headers):
            self._error(400, "InvalidArgument")
        else:
            return False
        return True

    def _bucket(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        s3 = self.server.s3
        if self.command == "PUT":
            s3.buckets.setdefault(bucket, {})
            self._answer(200)
        elif self.command == "HEAD":
            self._answer(200, headers={"x-amz-bucket-region": "us-east-1"})
        elif self.command == "POST" and "delete" in query:
            for part in body.decode().split("<Key>")[1:]:
                s3.buckets[bucket].pop(part.partition("</Key>")[0], None)
            self._answer(200, b"<DeleteResult></DeleteResult>", {"Content-Type": "application/xml"})
        elif self.command == "GET":
            self._list(s3.buckets[bucket], query)
        else:
            self._error(405, "MethodNotAllowed")

    def _list(self, objects: dict[str, Stored], query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        most = int(query.get("max-keys", 1000))
        keys = sorted(key for key in list(objects) if key.startswith(prefix) and key > after)
        items = []
        for key in keys[:most]:
            stored = objects.get(key)
            if stored is not None:  # not deleted meanwhile
                stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
                items.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{stamp}</LastModified>"
                    f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.body)}</Size></Contents>"
                )
        more = f"<NextContinuationToken>{escape(keys[most - 1])}</NextContinuationToken>" if len(keys) > most else ""
        document = (
            f'<?xml version="1.0"?><ListBucketResult><IsTruncated>{"true" if more else "false"}</IsTruncated>'
            f"{more}{''.join(items)}</ListBucketResult>"
        )
        self._answer(200, document.encode(), {"Content-Type": "application/xml"})

    def _object(
        self, objects: dict[str, Stored], key: str, headers: dict[str, str], body: bytes, fault: Fault | None
    ) -> None:
        if self.command == "PUT":
            self._put(objects, key, headers, body, fault)
        elif self.command == "DELETE":
            objects.pop(key, None)
            self._answer(204)
        elif (stored := objects.get(key)) is None:
            self._error(404, "NoSuchKey")
        else:
            self._get(objects, stored, headers, fault)

    def _put(
        self, objects: dict[str, Stored], key: str, headers: dict[str, str], body: bytes, fault: Fault | None
    ) -> None:
        blind = fault is not None and fault.mode == "ignore_conditions"
        metadata = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
        source = headers.get("x-amz-copy-source", "")
        with self.server.s3.lock:
            taken = headers.get("if-none-match") == "*" and key in objects and not blind
            if not taken:
                if source:
                    bucket, _, name = unquote(source).lstrip("/").partition("/")
                    body = self.server.s3.buckets[bucket][name].body
                objects[key] = Stored(body, metadata, headers.get("content-type", ""))
        if taken:
            self._error(412, "PreconditionFailed")
        elif source:
            self._answer(
                200, b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>", {"Content-Type": "application/xml"}
            )
        else:
            self._answer(200, headers={"ETag": objects[key].etag})

    def _get(self, objects: dict[str, Stored], stored: Stored, headers: dict[str, str], fault: Fault | None) -> None:
        mode = fault.mode if fault is not None else ""
        if headers.get("if-match", stored.etag) != stored.etag:
            self._error(412, "PreconditionFailed")
            return
        body = stored.body
        if mode == "wrong_object":
            others = [other.body for other in objects.values() if other is not stored]
            body = min(others, key=lambda other: abs(len(other) - len(stored.body)))
        if mode == "flip" and fault is not None:
            at = min(len(body) - 1, int(len(body) * fault.fraction))
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        out = {
            "ETag": stored.etag,
            "Content-Type": stored.content_type,
            "Last-Modified": email.utils.formatdate(stored.modified, usegmt=True),
            **stored.metadata,
        }
        status = 200
        if (wanted := headers.get("range", "")) and mode != "no_ranges":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(body), len(body))
            if start >= len(body):
                self._error(416, "InvalidRange")
                return
            status = 206
            out["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
            body = body[start:stop]
        self._answer(status, body, out, fault if self.command == "GET" else None)

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        document = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code} it is</Message></Error>'
        self._answer(status, document.encode(), {"Content-Type": "application/xml", **(headers or {})})

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, fault: Fault | None = None
    ) -> None:
        mode = fault.mode if fault is not None else ""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if mode == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            return
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD" or not body:
            return
        if mode in {"truncate", "reset", "trickle"} and fault is not None:
            self._spoil(body, fault)
        else:
            self.wfile.write(body)

    def _spoil(self, body: bytes, fault: Fault) -> None:
        self.wfile.write(body[: int(len(body) * fault.fraction)])
        self.wfile.flush()
        if fault.mode == "trickle":
            for at in range(int(len(body) * fault.fraction), len(body)):
                if self.server.s3.released.wait(0.02):
                    return
                self.wfile.write(body[at : at + 1])
                self.wfile.flush()
            return
        if fault.mode == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
