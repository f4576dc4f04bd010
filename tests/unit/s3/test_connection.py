"""The HTTP/1.1 of the fast path, over real sockets."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from kvstore_s3.connection import Connection, Endpoint, StaleError
from kvstore_s3.errors import S3Error
from kvstore_s3.pool import ConnectionPool

Talk = Callable[[socket.socket], None]


@contextmanager
def server(talk: Talk, family: socket.AddressFamily = socket.AF_INET) -> Iterator[Endpoint]:
    """Run ``talk`` with each connection, one after the other."""
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.create_server((host, 0), family=family) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    talk(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Endpoint(host, listener.getsockname()[1], None, 1.0, 1.0)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)


def says(*pieces: bytes) -> Talk:
    """Answer the first request with these pieces, sent one by one."""

    def talk(connection: socket.socket) -> None:
        connection.recv(65536)
        for piece in pieces:
            connection.sendall(piece)

    return talk


def waits(held: threading.Event) -> Talk:
    """Neither read nor answer until the event is set."""

    def talk(_: socket.socket) -> None:
        held.wait(5.0)

    return talk


def soon() -> float:
    return time.monotonic() + 5.0


@contextmanager
def asked(talk: Talk) -> Iterator[Connection]:
    with server(talk) as endpoint:
        connection = Connection(endpoint, soon())
        try:
            connection.send(b"GET / HTTP/1.1\r\n\r\n", (), soon())
            yield connection
        finally:
            connection.close()


def test_a_head_may_arrive_byte_by_byte() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-Amz-Meta-A:  b c \r\n\r\nabc"
    with asked(says(*(answer[i : i + 1] for i in range(len(answer))))) as connection:
        head = connection.answer("GET", soon())
        assert (head.status, head.nbytes, head.keep) == (200, 3, True)
        assert head.headers == {"content-length": "3", "x-amz-meta-a": "b c"}
        got = bytearray(3)
        view = memoryview(got)
        while view:
            view = view[connection.read_some(view, soon()) :]
        assert got == b"abc"


def test_a_head_may_be_longer_than_the_scratch_buffer() -> None:
    long = b"x-long: " + b"y" * 9000
    with asked(says(b"HTTP/1.1 200 OK\r\n" + long + b"\r\ncontent-length: 1\r\n\r\nz")) as connection:
        assert connection.answer("GET", soon()).headers["x-long"] == "y" * 9000
        one = bytearray(1)
        assert connection.read_some(memoryview(one), soon()) == 1
        assert one == b"z"


def test_interim_answers_are_passed_over() -> None:
    with asked(says(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")) as connection:
        assert connection.answer("PUT", soon()).status == 204


@pytest.mark.parametrize(
    ("head", "method", "nbytes", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close", "GET", 5, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5", "GET", 5, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: Keep-Alive", "GET", 5, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", "GET", -1, False),
        (b"HTTP/1.1 200 OK", "GET", -1, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5", "GET", -1, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", "HEAD", 0, True),
        (b"HTTP/1.1 304 Not Modified", "GET", 0, True),
    ],
)
def test_lengths_and_reuse_are_read_from_the_head(head: bytes, method: str, nbytes: int, *, keep: bool) -> None:
    with asked(says(head + b"\r\n\r\n")) as connection:
        answer = connection.answer(method, soon())
        assert (answer.nbytes, answer.keep) == (nbytes, keep)


@pytest.mark.parametrize("text", [b"SSH-2.0-x\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70_000])
def test_what_is_not_http_is_refused(text: bytes) -> None:
    with asked(says(text)) as connection, pytest.raises(S3Error):
        connection.answer("GET", soon())


def test_a_connection_that_ends_before_the_answer_is_stale() -> None:
    with asked(says()) as connection, pytest.raises(StaleError):
        connection.answer("GET", soon())


def test_a_silent_server_ends_at_the_deadline() -> None:
    held = threading.Event()
    with asked(waits(held)) as connection:
        began = time.monotonic()
        with pytest.raises(OSError, match=r"unavailable|^$"):
            connection.answer("GET", began + 0.2)
        assert 0.1 < time.monotonic() - began < 1.0
        held.set()


def test_a_server_that_does_not_read_ends_at_the_deadline() -> None:
    held = threading.Event()
    with server(waits(held)) as endpoint:
        connection = Connection(endpoint, soon())
        began = time.monotonic()
        with pytest.raises(OSError, match=r"unavailable|^$"):
            connection.send(b"PUT / HTTP/1.1\r\n\r\n", [bytes(64 << 20)], began + 0.3)
        assert time.monotonic() - began < 1.5
        held.set()
        connection.close()


def test_many_buffers_are_sent_in_order() -> None:
    parts = [os.urandom(i % 700) for i in range(1500)]  # more than one sendmsg takes
    whole = b"".join(parts)
    received = bytearray()
    done = threading.Event()

    def talk(connection: socket.socket) -> None:
        while len(received) < 5 + len(whole) and (piece := connection.recv(65536)):
            received.extend(piece)
        done.set()

    with server(talk) as endpoint:
        connection = Connection(endpoint, soon())
        connection.send(b"head:", [memoryview(part) for part in parts], soon())
        assert done.wait(5.0)
        connection.close()
    assert bytes(received) == b"head:" + whole


def test_ipv6_is_spoken() -> None:
    with server(says(b"HTTP/1.1 204 No Content\r\n\r\n"), socket.AF_INET6) as endpoint:
        connection = Connection(endpoint, soon())
        connection.send(b"PUT / HTTP/1.1\r\n\r\n", (), soon())
        assert connection.answer("PUT", soon()).status == 204
        connection.close()


def test_the_pool_reuses_and_bounds_connections() -> None:
    with server(says()) as endpoint:
        pool = ConnectionPool(endpoint, 2)
        first, second = pool.take(soon()), pool.take(soon())
        with pytest.raises(TimeoutError):
            pool.take(time.monotonic() + 0.05)
        pool.give(first, keep=True)
        assert pool.take(soon()) is first
        pool.give(first, keep=False)
        pool.give(second, keep=True)
        pool.close()
        late = ConnectionPool(endpoint, 1)
        out = late.take(soon())
        late.close()
        late.give(out, keep=True)
        with pytest.raises(OSError, match=r"closed|descriptor"):
            out.send(b"x", (), soon())


def test_a_connection_that_the_server_closed_is_not_handed_out() -> None:
    gone = threading.Event()

    def talk(connection: socket.socket) -> None:
        connection.recv(10)
        connection.close()
        gone.set()

    with server(talk) as endpoint:
        pool = ConnectionPool(endpoint, 1)
        first = pool.take(soon())
        first.send(b"x", (), soon())
        assert gone.wait(5.0)
        pool.give(first, keep=True)
        end = soon()
        while not first.stale and time.monotonic() < end:  # until the FIN has arrived
            pass
        second = pool.take(soon())
        assert second is not first
        pool.give(second, keep=False)


def test_a_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(socket.gaierror):
        Connection(Endpoint("nowhere.invalid", 80, None, 1.0, 1.0), soon())


def test_a_handshake_with_a_server_without_tls_fails_in_time() -> None:
    with server(says(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as endpoint:
        tls = ssl.create_default_context()
        with pytest.raises(OSError, match=r"SSL|TLS|record"):
            Connection(Endpoint(endpoint.host, endpoint.port, tls, 1.0, 1.0), soon())
