"""Objects over connections of our own: one system call sends a pack, one receives a block into its place."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final
from urllib.parse import quote

from kvstore.objects.medium import ObjectInfo
from kvstore.types import Call
from kvstore_s3.access import Access, keys_of
from kvstore_s3.connection import Answer, Connection, StaleError, header_number
from kvstore_s3.data_path import (
    DataPath,
    EmptyStream,
    Put,
    Span,
    Stream,
    check_answer,
    info_from,
    put_headers,
    refuse_page,
)
from kvstore_s3.errors import S3Error, Trouble, from_answer, from_os
from kvstore_s3.options import S3Options
from kvstore_s3.plan import Plan
from kvstore_s3.pool import ConnectionPool
from kvstore_s3.signing import EMPTY_SHA256, UNSIGNED, Signer, payload_sha256

_MAX_DOCUMENT_BYTES: Final = 64 << 10  # error documents have a few hundred bytes
_SKIP_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class _Request:
    """What is sent, before it is signed.

    Attributes:
        method: HTTP verb.
        key: Of the object.
        extra: Header lines that need no signature.
        headers: Headers to sign.
        buffers: Body.
    """

    method: str
    key: str
    extra: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    buffers: Sequence[memoryview | bytes] = ()


class FastPath(DataPath):
    """The three verbs over a :class:`~kvstore_s3.pool.ConnectionPool`; one process."""

    name: ClassVar[str] = "fast"

    def __init__(self, access: Access, plan: Plan, options: S3Options, *, sign_payload: bool) -> None:
        self._access: Final = access
        self._plan: Final = plan
        self._options: Final = options
        self._signer: Final = Signer(plan.region)
        self._pool = ConnectionPool(plan.endpoint, options.connections)
        self._sign_payload: Final = sign_payload

    def get(self, key: str, span: Span, call: Call, *, etag: str = "") -> Stream | None:
        """Open a range; the connection is the stream's until its last byte was read."""
        extra = f"range: {span.header}\r\n" if span.header else ""
        if etag:
            extra += f"if-match: {etag}\r\n"
        connection, answer = self._exchange(_Request("GET", key, extra), call)
        try:
            if answer.status in {200, 206} and answer.nbytes >= 0:
                return _FastStream(self._pool, connection, answer, span, call)
            if answer.status == 416:
                self._finish(connection, answer, call)
                return EmptyStream()
            error = self._error(connection, answer, call)
        except BaseException:
            self._pool.give(connection, keep=False)
            raise
        if error.status == 404 and error.trouble is not Trouble.CONFIG:
            return None
        raise error

    def put(self, key: str, put: Put, call: Call) -> bool:
        """Write an object from its parts, without joining them."""
        extra = f"content-length: {put.nbytes}\r\n" + ("if-none-match: *\r\n" if put.once else "")
        headers = put_headers(self._options, put.blocks)
        connection, answer = self._exchange(_Request("PUT", key, extra, headers, put.buffers), call)
        try:
            if answer.status in {200, 201, 204}:
                if "etag" not in answer.headers:
                    refuse_page(answer.headers)
                self._finish(connection, answer, call)
                return True
            error = self._error(connection, answer, call)
        except BaseException:
            self._pool.give(connection, keep=False)
            raise
        if put.once and answer.status in {409, 412}:
            return False
        raise error

    def head(self, key: str, call: Call) -> ObjectInfo | None:
        """Look at an object."""
        connection, answer = self._exchange(_Request("HEAD", key), call)
        self._pool.give(connection, keep=answer.keep)
        if answer.status == 200:
            refuse_page(answer.headers)
            length = header_number(answer.headers.get("content-length", ""), 0)
            return info_from(key, answer.headers, length)
        if answer.status == 404:
            return None
        raise from_answer(answer.status, answer.headers, b"")

    def close(self) -> None:
        """Close idle connections; those in use are closed when they come back."""
        self._pool.close()

    def _exchange(self, request: _Request, call: Call) -> tuple[Connection, Answer]:
        """Send a request and take the head of its answer; the connection then belongs to the caller."""
        try:
            try:
                return self._once(request, call.deadline, fresh=False)
            except StaleError:
                return self._once(request, call.deadline, fresh=True)
        except StaleError as e:
            raise S3Error(Trouble.NETWORK, str(e)) from e
        except OSError as e:
            raise from_os(e) from e

    def _once(self, request: _Request, deadline: float, *, fresh: bool) -> tuple[Connection, Answer]:
        pool = self._pool_here()
        connection = pool.take(deadline, fresh=fresh)
        was_used = connection.used
        try:
            try:
                connection.send(self._head(request), request.buffers, deadline)
            except (BrokenPipeError, ConnectionResetError) as e:
                if was_used:
                    raise StaleError(f"connection closed while sending ({e.strerror})") from e
                # a server that refuses a large body answers first and closes then: its answer says why
            return connection, connection.answer(request.method, deadline)
        except StaleError as e:
            pool.give(connection, keep=False)
            if not was_used:
                raise ConnectionResetError(0, str(e)) from e
            raise
        except BaseException:
            pool.give(connection, keep=False)
            raise

    def _head(self, request: _Request) -> bytes:
        payload = EMPTY_SHA256
        if request.method == "PUT":
            payload = payload_sha256(request.buffers) if self._sign_payload else UNSIGNED
        keys = keys_of(self._access.client().credentials)
        path = self._plan.path + quote(request.key, safe="/~")
        signed = self._signer.head(f"{request.method} {path}", self._plan.host, request.headers, keys, payload=payload)
        return f"{signed}{request.extra}\r\n".encode("latin-1")

    def _pool_here(self) -> ConnectionPool:
        """Return this process's pool: a child must not talk over its parent's sockets."""
        pool = self._pool
        if pool.pid != os.getpid():
            self._pool = pool = ConnectionPool(self._plan.endpoint, self._options.connections)
        return pool

    def _error(self, connection: Connection, answer: Answer, call: Call) -> S3Error:
        """Read the error document; gives the connection back."""
        nbytes = _MAX_DOCUMENT_BYTES if answer.nbytes < 0 else min(answer.nbytes, _MAX_DOCUMENT_BYTES)
        document = memoryview(bytearray(nbytes))
        got = 0
        deadline = min(call.deadline, time.monotonic() + self._options.read_timeout)
        with contextlib.suppress(OSError):  # the status is known, its explanation is a bonus
            while got < nbytes:
                more = connection.read_some(document[got:], deadline)
                got += more
                if not more or (answer.nbytes < 0 and b"</Error>" in bytes(document[:got])):
                    break
        self._pool.give(connection, keep=answer.keep and got == answer.nbytes)
        if answer.status in {200, 206}:
            return S3Error(Trouble.FOREIGN, "an answer came without its length")
        return from_answer(answer.status, answer.headers, bytes(document[:got]))

    def _finish(self, connection: Connection, answer: Answer, call: Call) -> None:
        """Read what is left of an answer whose status said all; gives the connection back."""
        left = answer.nbytes
        keep = answer.keep
        scratch = memoryview(bytearray(min(max(left, 0), _SKIP_BYTES)))
        try:
            while left > 0:
                got = connection.read_some(scratch[: min(left, len(scratch))], call.deadline)
                if not got:
                    keep = False
                    break
                left -= got
        except OSError:
            keep = False
        self._pool.give(connection, keep=keep)


class _FastStream(Stream):
    """Bytes straight from the socket into the caller's memory."""

    def __init__(self, pool: ConnectionPool, connection: Connection, answer: Answer, span: Span, call: Call) -> None:
        self.headers = answer.headers
        skip, self.nbytes = check_answer(answer.headers, span, answer.nbytes)
        self._pool: Final = pool
        self._connection: Connection | None = connection
        self._keep: Final = answer.keep
        self._left = answer.nbytes  # of the answer's body, which may be longer than what was asked for
        scratch = memoryview(bytearray(min(skip, _SKIP_BYTES)))
        while skip:
            got = self.read_some(scratch[: min(skip, len(scratch))], call)
            if not got:
                raise S3Error(Trouble.BODY, "the body ended before the bytes that were asked for")
            skip -= got

    def read_some(self, view: memoryview, call: Call) -> int:
        connection = self._connection
        if connection is None:
            return 0
        try:
            got = connection.read_some(view, call.deadline)
        except OSError as e:
            error = from_os(e)
            raise S3Error(Trouble.BODY, str(error)) if error.trouble is Trouble.NETWORK else error from e
        self._left -= got
        if self._left == 0:
            self.close()  # the next request may have the connection while this body is still decoded
        return got

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give(connection, keep=self._keep and self._left == 0)
