"""Keep-alive connections to one endpoint, at most so many at once."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from kvstore_s3.connection import Connection, Endpoint


class ConnectionPool:
    """Hands out connections, newest first; one that is out belongs to its taker.  Thread-safe.

    Attributes:
        pid: Process whose sockets these are.
    """

    def __init__(self, endpoint: Endpoint, connections: int) -> None:
        self.pid: Final = os.getpid()
        self._endpoint: Final = endpoint
        self._free: Final = threading.Semaphore(connections)
        self._idle: Final[list[Connection]] = []  # append and pop are atomic
        self._closed = False

    def take(self, deadline: float, *, fresh: bool = False) -> Connection:
        """Return an idle connection or a new one; waits while all are out.

        Args:
            deadline: ``time.monotonic()`` value after which to give up.
            fresh: Make a new one in any case.

        Raises:
            OSError: Connecting failed.
            TimeoutError: All connections stayed out until the deadline.
        """
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            while not fresh:
                try:
                    connection = self._idle.pop()
                except IndexError:
                    break
                if not connection.stale:
                    return connection
                connection.close()
            return Connection(self._endpoint, deadline)
        except BaseException:
            self._free.release()
            raise

    def give(self, connection: Connection, *, keep: bool) -> None:
        """Take a connection back; close it unless it can carry another request."""
        if keep and not self._closed and connection.idle:
            self._idle.append(connection)
        else:
            connection.close()
        self._free.release()
        if self._closed:
            self.close()

    def close(self) -> None:
        """Close idle connections; those that are out are closed when they come back."""
        self._closed = True
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return
