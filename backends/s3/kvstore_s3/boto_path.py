"""Objects through boto3: slower, but at home with every kind of endpoint, proxy and credential."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, TypeVar

import botocore.exceptions  # type: ignore[import-untyped]
import urllib3.exceptions

from kvstore.objects.medium import ObjectInfo
from kvstore.types import Call
from kvstore_s3.access import Access
from kvstore_s3.data_path import (
    BLOCKS_METADATA,
    CONTENT_TYPE,
    DataPath,
    EmptyStream,
    Put,
    Span,
    Stream,
    check_answer,
    info_from,
    refuse_page,
)
from kvstore_s3.errors import S3Error, Trouble, from_boto
from kvstore_s3.options import S3Options

T = TypeVar("T")

_PIECE_BYTES: Final = 256 << 10  # one read of the socket; large enough to make the loop's cost vanish
_FAILURES: Final = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    urllib3.exceptions.HTTPError,
    OSError,
    RuntimeError,
)


def ask(access: Access, request: Callable[[Any], T]) -> T:
    """Run one request with boto3's client.

    Raises:
        S3Error: It failed.
    """
    try:
        return request(access.client().s3)
    except _FAILURES as e:
        raise from_boto(e) from e


class BotoPath(DataPath):
    """The three verbs through boto3, no more requests at once than there are connections.

    Beyond those, urllib3 would make a connection for each request and throw it away.
    """

    name: ClassVar[str] = "boto3"

    def __init__(self, access: Access, options: S3Options) -> None:
        self._access: Final = access
        self._bucket: Final = options.bucket
        extra = {
            "StorageClass": options.storage_class,
            "ServerSideEncryption": options.sse,
            "SSEKMSKeyId": options.sse_kms_key_id,
        }
        self._extra: Final = {name: value for name, value in extra.items() if value is not None}
        self._free: Final = threading.Semaphore(options.connections)

    def _take(self, call: Call) -> None:
        """Wait for a connection; pair with a release."""
        if not self._free.acquire(timeout=max(0.0, call.remaining())):
            raise S3Error(Trouble.TIMEOUT, "all connections stayed in use until the deadline")

    @contextlib.contextmanager
    def _connection(self, call: Call) -> Iterator[None]:
        self._take(call)
        try:
            yield
        finally:
            self._free.release()

    def get(self, key: str, span: Span, call: Call, *, etag: str = "") -> Stream | None:
        """Open a range; a silent server is given up after ``read_timeout``, which boto3 fixes for a client's life."""
        wanted = {"Range": span.header} if span.header else {}
        if etag:
            wanted["IfMatch"] = etag
        self._take(call)
        try:
            answer = ask(self._access, lambda s3: s3.get_object(Bucket=self._bucket, Key=key, **wanted))
            body = answer["Body"]
            try:
                return _BotoStream(body, _headers(answer), span, call, self._free.release)
            except BaseException:
                body.close()
                raise
        except BaseException as e:
            self._free.release()
            if not isinstance(e, S3Error):
                raise
            if e.status == 404 and e.trouble is not Trouble.CONFIG:
                return None
            if e.status == 416:  # the range begins behind the end
                return EmptyStream()
            raise

    def put(self, key: str, put: Put, call: Call) -> bool:
        """Write an object; boto3 wants the body in one piece, which costs a copy."""
        condition = {"IfNoneMatch": "*"} if put.once else {}
        body = put.buffers[0] if len(put.buffers) == 1 and isinstance(put.buffers[0], bytes) else b"".join(put.buffers)
        try:
            with self._connection(call):
                answer = ask(
                    self._access,
                    lambda s3: s3.put_object(
                        Bucket=self._bucket,
                        Key=key,
                        Body=body,
                        ContentType=CONTENT_TYPE,
                        Metadata={BLOCKS_METADATA: str(put.blocks)},
                        **condition,
                        **self._extra,
                    ),
                )
        except S3Error as e:
            if put.once and e.status in {409, 412}:
                return False
            raise
        if "ETag" not in answer:
            refuse_page(_headers(answer))
        return True

    def head(self, key: str, call: Call) -> ObjectInfo | None:
        """Look at an object."""
        try:
            with self._connection(call):
                answer = ask(self._access, lambda s3: s3.head_object(Bucket=self._bucket, Key=key))
        except S3Error as e:
            if e.status == 404:
                return None
            raise
        refuse_page(_headers(answer))
        return info_from(key, _headers(answer), int(answer["ContentLength"]))


class _BotoStream(Stream):
    """Reads urllib3's response piece by piece, so that the deadline is looked at between pieces.

    Args:
        release: Called once, when the stream is closed.
    """

    def __init__(self, body: Any, headers: dict[str, str], span: Span, call: Call, release: Callable[[], None]) -> None:
        self.headers = headers
        self._release: Callable[[], None] | None = release
        length = headers.get("content-length", "")
        if not length.isdecimal():
            raise S3Error(Trouble.FOREIGN, "an answer came without its length")
        skip, self.nbytes = check_answer(headers, span, int(length))
        self._body: Final = body
        # read1 returns what one recv brought; a plain read would wait for the whole piece, however slowly it trickles
        raw = getattr(body, "_raw_stream", None)
        self._read1: Final[Callable[[int], bytes]] = getattr(raw, "read1", None) or body.read
        scratch = memoryview(bytearray(min(skip, _PIECE_BYTES)))
        while skip:
            got = self.read_some(scratch[: min(skip, len(scratch))], call)
            if not got:
                raise S3Error(Trouble.BODY, "the body ended before the bytes that were asked for")
            skip -= got

    def read_some(self, view: memoryview, call: Call) -> int:  # noqa: ARG002 - boto3 takes no deadline for one read
        try:
            piece = self._read1(min(view.nbytes, _PIECE_BYTES))
        except urllib3.exceptions.ReadTimeoutError as e:
            raise S3Error(Trouble.TIMEOUT, "the body came too slowly") from e
        except urllib3.exceptions.HTTPError as e:
            raise S3Error(Trouble.BODY, f"the body ended early ({type(e).__name__})") from e
        except _FAILURES as e:
            raise from_boto(e) from e
        view[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        release, self._release = self._release, None
        try:
            self._body.close()
        finally:
            if release is not None:
                release()


def _headers(answer: dict[str, Any]) -> dict[str, str]:
    headers: dict[str, str] = answer["ResponseMetadata"]["HTTPHeaders"]
    return headers
