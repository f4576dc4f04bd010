"""How objects travel: three verbs that two implementations share, and the stream that a GET answers with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from calendar import timegm
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from kvstore.objects.medium import ObjectInfo
from kvstore.types import Call
from kvstore_s3.connection import header_number
from kvstore_s3.errors import S3Error, Trouble
from kvstore_s3.options import S3Options

BLOCKS_HEADER: Final = "x-amz-meta-kvstore-blocks"
BLOCKS_METADATA: Final = "kvstore-blocks"
CONTENT_TYPE: Final = "application/octet-stream"
_DOCUMENTS: Final = ("text/html", "text/plain", "application/xml", "text/xml")  # what pages and errors come as
_MAX_TIME: Final = float(1 << 38)  # the year 10680
_MONTHS: Final = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), start=1
    )
}


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[start, stop)`` of an object; ``stop`` None for its end."""

    start: int = 0
    stop: int | None = None

    @property
    def header(self) -> str:
        """The ``Range`` header; empty when the whole object is meant."""
        if self.stop is None:
            return f"bytes={self.start}-" if self.start else ""
        return f"bytes={self.start}-{self.stop - 1}"


@dataclass(frozen=True, slots=True)
class Put:
    """One object to write.

    Attributes:
        buffers: Gather list.
        nbytes: Their length in all.
        blocks: To be remembered with the object.
        once: Ask the server to leave a stored object alone.
    """

    buffers: Sequence[memoryview | bytes]
    nbytes: int
    blocks: int
    once: bool


class Stream(ABC):
    """The body of one GET answer; one thread, front to back.

    Attributes:
        nbytes: Bytes to come; exactly what was asked for, cut at the object's end.
        headers: Of the answer, with lower-case names.
    """

    nbytes: int
    headers: Mapping[str, str]

    @abstractmethod
    def read_some(self, view: memoryview, call: Call) -> int:
        """Fill the start of a view that is not empty; 0 when the connection ended.

        Raises:
            S3Error: Reading failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the connection back, or close it when the body was not read to its end; idempotent."""


class EmptyStream(Stream):
    """The answer to a range behind the object's end."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.headers = {}

    def read_some(self, view: memoryview, call: Call) -> int:  # noqa: ARG002 - nothing comes
        """Say that the end is reached."""
        return 0

    def close(self) -> None:
        """Nothing is held."""


class DataPath(ABC):
    """Sends one request and takes its answer, without trying again.  Thread-safe.

    Every method raises :class:`~kvstore_s3.errors.S3Error` for whatever is neither success nor a
    plain "not there".
    """

    name: ClassVar[str]

    @abstractmethod
    def get(self, key: str, span: Span, call: Call, *, etag: str = "") -> Stream | None:
        """Open a range of an object; None when there is no such object.

        Args:
            key: Which object.
            span: Which bytes.
            call: Limits.
            etag: Fail when the object is not this version any more.
        """

    @abstractmethod
    def put(self, key: str, put: Put, call: Call) -> bool:
        """Write an object; False when ``put.once`` found the key taken."""

    @abstractmethod
    def head(self, key: str, call: Call) -> ObjectInfo | None:
        """Look at an object; None when it is absent (or its bucket is: a HEAD cannot tell)."""

    def close(self) -> None:
        """Close idle connections."""


def put_headers(options: S3Options, blocks: int) -> dict[str, str]:
    """Return what an object is stored with, names in lower case and in order."""
    headers = {"content-type": CONTENT_TYPE, BLOCKS_HEADER: str(blocks)}
    if options.sse is not None:
        headers["x-amz-server-side-encryption"] = options.sse
    if options.sse_kms_key_id is not None:
        headers["x-amz-server-side-encryption-aws-kms-key-id"] = options.sse_kms_key_id
    if options.storage_class is not None:
        headers["x-amz-storage-class"] = options.storage_class
    return dict(sorted(headers.items()))


def info_from(key: str, headers: Mapping[str, str], nbytes: int) -> ObjectInfo:
    """Read what the headers of an answer (lower-case names) say about an object."""
    blocks = header_number(headers.get(BLOCKS_HEADER, ""), 0)
    return ObjectInfo(key, nbytes, http_time(headers.get("last-modified", "")), blocks)


def http_time(text: str) -> float:
    """Return the Unix time of ``Sun, 06 Nov 1994 08:49:37 GMT``; 0.0 for anything else."""
    try:
        _, day, month, year, clock, _ = text.split()
        hour, minute, second = clock.split(":")
        time = float(timegm((int(year), _MONTHS[month], int(day), int(hour), int(minute), int(second))))
    except (ValueError, KeyError, OverflowError):
        return 0.0
    return time if 0.0 <= time < _MAX_TIME else 0.0


def check_answer(headers: Mapping[str, str], span: Span, nbytes: int) -> tuple[int, int]:
    """Compare the answer to a GET with what was asked; return bytes to skip and bytes wanted after them.

    Args:
        headers: Of the answer, with lower-case names.
        span: What was asked.
        nbytes: Length of the answer's body.

    Raises:
        S3Error: A web page or an error document came instead of an object, or another range.
    """
    refuse_page(headers)
    ranged = headers.get("content-range", "")
    if not ranged:
        wanted = max(0, nbytes - span.start if span.stop is None else min(span.stop, nbytes) - span.start)
        return (span.start if wanted else nbytes), wanted
    if not ranged.startswith(f"bytes {span.start}-"):
        raise S3Error(Trouble.FOREIGN, f"bytes from {span.start} were asked for, {ranged!r} came")
    return 0, nbytes if span.stop is None else min(nbytes, span.stop - span.start)


def refuse_page(headers: Mapping[str, str]) -> None:
    """See that a success was told by an S3 server and not by a login page or a proxy.

    Raises:
        S3Error: A document came that no object of ours is stored as.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _DOCUMENTS and BLOCKS_HEADER not in headers:
        raise S3Error(Trouble.FOREIGN, f"a document of type {kind} came with status 200 instead of an S3 answer")


def total_of(headers: Mapping[str, str], default: int) -> int:
    """Return the object's whole length from ``Content-Range: bytes 0-0/1234``."""
    return header_number(headers.get("content-range", "").rpartition("/")[2], default)
