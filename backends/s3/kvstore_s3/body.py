"""The bytes of an object as the caller reads them: full length or an error, with one second chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstore.errors import BackendError
from kvstore.objects.medium import ObjectBody
from kvstore.types import Call
from kvstore_s3.data_path import Stream, http_time
from kvstore_s3.errors import S3Error, Trouble, out_of_time

Reopen = Callable[[int, str], Stream | None]
"""``reopen(offset, etag)``: the same body from ``offset`` on, of the same version of the object."""

Failed = Callable[[S3Error], BackendError]
"""Counts a failure and makes the exception for the caller."""


class S3Body(ObjectBody):
    """One body; when its connection breaks, the rest is asked for once more.

    boto3 never does that: its retries end with the headers.
    """

    def __init__(self, stream: Stream, call: Call, reopen: Reopen, failed: Failed) -> None:
        self.nbytes = stream.nbytes
        self.modified = http_time(stream.headers.get("last-modified", ""))
        self._stream: Final[list[Stream]] = [stream]
        self._call: Final = call
        self._reopen: Final = reopen
        self._failed: Final = failed
        self._read_bytes = 0
        self._second = False

    def read_into(self, view: memoryview) -> None:
        """Fill ``view``; what the first connection did not deliver comes over a second one."""
        view = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        if view.nbytes > self.nbytes - self._read_bytes:
            raise self._failed(
                S3Error(
                    Trouble.BODY,
                    f"{view.nbytes} bytes wanted at {self._read_bytes} of a body of {self.nbytes} bytes",
                )
            )
        while view.nbytes:
            try:
                got = self._read_some(view)
            except S3Error as e:
                raise self._failed(e) from e
            self._read_bytes += got
            view = view[got:]

    def _read_some(self, view: memoryview) -> int:
        if self._call.stop():
            raise out_of_time(self._call, f"the call was over at {self._read_bytes} of {self.nbytes} bytes")
        stream = self._stream[0]
        try:
            got = stream.read_some(view, self._call)
        except S3Error as e:
            if self._second or not e.worth_another or self._call.stop():
                raise
            self._failed(e)
            got = 0
        else:
            if got:
                return got
            if self._second:  # raised where it is made: an exception in a variable keeps this frame and its connection
                raise self._ended_early()
            self._failed(self._ended_early())
        self._start_again(stream)
        return got

    def _ended_early(self) -> S3Error:
        return S3Error(Trouble.BODY, f"the body ended after {self._read_bytes} of {self.nbytes} bytes")

    def _start_again(self, broken: Stream) -> None:
        self._second = True
        broken.close()
        stream = self._reopen(self._read_bytes, broken.headers.get("etag", ""))
        if stream is None:
            raise S3Error(Trouble.BODY, "the object was deleted while it was read")
        self._stream[0] = stream
        if stream.nbytes != self.nbytes - self._read_bytes:
            raise S3Error(Trouble.BODY, f"the rest has {stream.nbytes} bytes, not {self.nbytes - self._read_bytes}")

    def close(self) -> None:
        """Give the connection back."""
        self._stream[0].close()
