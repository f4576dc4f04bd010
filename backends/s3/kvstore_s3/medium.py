"""A bucket as a medium for whole objects: tries again within the deadline, tells "absent" from "broken"."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from kvstore.errors import BackendError
from kvstore.objects.medium import ObjectBody, ObjectInfo, ObjectMedium
from kvstore.types import Call
from kvstore_s3.access import Access
from kvstore_s3.body import S3Body
from kvstore_s3.boto_path import ask
from kvstore_s3.data_path import BLOCKS_METADATA, CONTENT_TYPE, DataPath, Put, Span, Stream, info_from, total_of
from kvstore_s3.errors import S3Error, Trouble, from_answer, out_of_time, translate
from kvstore_s3.options import S3Options
from kvstore_s3.troubles import Troubles

T = TypeVar("T")

_PAUSE_S: Final = (0.03, 0.1)  # jittered, before the second try of a throttled or failed request
_DELETE_BATCH: Final = 1000  # what DeleteObjects takes at once
_REFUSES_BATCHES: Final = frozenset({400, 405, 411, 501})  # answers of servers without (our kind of) DeleteObjects


class S3Medium(ObjectMedium):
    """One bucket, seen through a prefix that all keys get.

    Data go through a :class:`~kvstore_s3.data_path.DataPath`; lists, copies and deletions through
    boto3.  Requests are tried ``attempts`` times in all while the call's deadline allows it.
    """

    def __init__(self, access: Access, path: DataPath, options: S3Options, troubles: Troubles, *, once: bool) -> None:
        self._access: Final = access
        self._path: Final = path
        self._options: Final = options
        self._troubles: Final = troubles
        self._place: Final = f"bucket {options.bucket!r}"
        self._once: Final = once
        self._head_denied = False
        self._no_batch_delete = False
        self._requests: Final = itertools.count(1)
        self._sent = 0
        self._prefix: Final = f"{options.prefix}/" if options.prefix else ""

    @property
    def put_once(self) -> bool:
        """Whether the server leaves stored objects alone when asked to."""
        return self._once

    def read(self, key: str, call: Call, *, start: int = 0, stop: int | None = None) -> ObjectBody | None:
        """Open bytes of an object: one GET, no HEAD before it."""
        key = self._prefix + key
        if stop is not None and stop <= start:
            return _Nothing()

        def reopen(offset: int, etag: str) -> Stream | None:
            return self._path.get(key, Span(start + offset, stop), call, etag=etag)

        stream = self._try(f"GET {key}", call, lambda: self._path.get(key, Span(start, stop), call))
        if stream is None:
            return None
        return S3Body(stream, call, reopen, lambda e: self._failed(e, f"GET {key}"))

    def write(self, key: str, buffers: Sequence[memoryview | bytes], call: Call, *, once: bool, blocks: int) -> bool:
        """Publish an object with one PUT, whatever its size; ``once`` holds where the server honours it."""
        key = self._prefix + key
        put = Put(buffers, sum(memoryview(b).nbytes for b in buffers), blocks, once and self._once)
        return self._try(f"PUT {key}", call, lambda: self._path.put(key, put, call))

    def head(self, key: str, call: Call) -> ObjectInfo | None:
        """Look at an object; an account that may not HEAD what is absent reads a byte instead."""
        found = self._head(self._prefix + key, call)
        return None if found is None else replace(found, key=key)

    def _head(self, key: str, call: Call) -> ObjectInfo | None:
        if not self._head_denied:
            try:
                return self._try(f"HEAD {key}", call, lambda: self._path.head(key, call), denied_is_final=False)
            except S3Error as e:
                self._troubles.note(e, f"HEAD {key}")
        found = self._try(f"GET {key}", call, lambda: self._look(key, call))
        self._head_denied = True  # it was the HEAD, not the object
        return found

    def remove(self, keys: Sequence[str], call: Call) -> None:
        """Remove objects, a thousand a request where the server can."""
        for at in range(0, len(keys), _DELETE_BATCH):
            batch = [self._prefix + key for key in keys[at : at + _DELETE_BATCH]]
            if len(batch) == 1 or self._no_batch_delete or not self._remove_batch(batch, call):
                for key in batch:
                    self._remove_one(key, call)

    def refresh(self, key: str, call: Call) -> None:
        """Copy an object onto itself, which makes it young for lifecycle rules; no bytes travel."""
        key = self._prefix + key
        found = self._head(key, call)
        if found is None:
            return
        source = {"Bucket": self._options.bucket, "Key": key}
        extra = {
            "StorageClass": self._options.storage_class,
            "ServerSideEncryption": self._options.sse,
            "SSEKMSKeyId": self._options.sse_kms_key_id,
        }
        self._control(
            f"COPY {key}",
            call,
            lambda s3: s3.copy_object(  # onto itself is allowed only when something is replaced
                **source,
                CopySource=source,
                MetadataDirective="REPLACE",
                Metadata={BLOCKS_METADATA: str(found.blocks)},
                ContentType=CONTENT_TYPE,
                **{name: value for name, value in extra.items() if value is not None},
            ),
            absent_ok=True,
        )

    def entries(self, prefix: str, call: Call) -> Iterator[ObjectInfo]:
        """List objects, a thousand a request; listings know no block counts."""
        wanted = {"Bucket": self._options.bucket, "Prefix": self._prefix + prefix}
        while True:
            page = self._list(wanted, call)
            for item in page.get("Contents", ()):
                yield ObjectInfo(
                    item["Key"].removeprefix(self._prefix), int(item["Size"]), item["LastModified"].timestamp()
                )
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def _list(self, wanted: dict[str, str], call: Call) -> dict[str, Any]:
        return self._control(f"LIST {wanted['Prefix']}", call, lambda s3: s3.list_objects_v2(**wanted))

    def describe(self) -> dict[str, str]:
        """Facts for ``stat`` and ``doctor``."""
        facts = {
            "bucket": self._options.bucket,
            "prefix": self._options.prefix,
            "endpoint": self._options.endpoint_url or "AWS",
            "region": self._access.client().region,
            "data path": self._path.name,
            "put once": "yes" if self._once else "no",
            "requests": f"{self._sent}",
        }
        return facts | {name: f"{count}" for name, count in self._troubles.counts().items()}

    def close(self) -> None:
        """Close all connections."""
        self._path.close()
        self._access.close()

    def _look(self, key: str, call: Call) -> ObjectInfo | None:
        """Find an object by reading its first byte: for accounts that may read but not HEAD what is absent."""
        stream = self._path.get(key, Span(0, 1), call)
        if stream is None:
            return None
        stream.close()
        return info_from(key, stream.headers, total_of(stream.headers, stream.nbytes))

    def _remove_one(self, key: str, call: Call) -> None:
        self._control(f"DELETE {key}", call, lambda s3: s3.delete_object(Bucket=self._options.bucket, Key=key))

    def _remove_batch(self, keys: Sequence[str], call: Call) -> bool:
        """Delete many objects at once; False when this server cannot."""
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        doing = f"DELETE of {len(keys)} objects"
        try:
            answer = self._attempts(
                call,
                lambda: ask(self._access, lambda s3: s3.delete_objects(Bucket=self._options.bucket, Delete=wanted)),
            )
        except S3Error as e:
            if e.status in _REFUSES_BATCHES and e.trouble is Trouble.REFUSED:
                self._no_batch_delete = True
                return False
            raise self._failed(e, doing) from e
        for refused in answer.get("Errors", ()):
            if refused.get("Code") != "NoSuchKey":
                error = from_answer(403 if refused.get("Code") == "AccessDenied" else 500, {}, b"")
                raise self._failed(error, f"DELETE {refused.get('Key')}: {refused.get('Code')}")
        return True

    def _control(
        self, doing: str, call: Call, request: Callable[[Any], dict[str, Any]], *, absent_ok: bool = False
    ) -> dict[str, Any]:
        try:
            return self._attempts(call, lambda: ask(self._access, request))
        except S3Error as e:
            if absent_ok and e.status == 404 and e.trouble is not Trouble.CONFIG:
                return {}
            raise self._failed(e, doing) from e

    def _try(self, doing: str, call: Call, request: Callable[[], T], *, denied_is_final: bool = True) -> T:
        try:
            return self._attempts(call, request)
        except S3Error as e:
            if e.status == 403 and e.trouble is Trouble.DENIED and not denied_is_final:
                raise
            raise self._failed(e, doing) from e

    def _attempts(self, call: Call, request: Callable[[], T]) -> T:
        for attempt in range(1, self._options.attempts + 1):
            if call.stop():
                break
            self._sent = next(self._requests)
            client = self._access.client()
            try:
                return request()
            except S3Error as e:
                if attempt == self._options.attempts or not e.worth_another or call.stop():
                    raise
                if e.trouble is Trouble.EXPIRED and not self._access.renew(client):
                    raise
                self._troubles.note(e, "first try")
                if e.trouble in {Trouble.THROTTLED, Trouble.SERVER}:
                    time.sleep(min(random.uniform(*_PAUSE_S), call.remaining()))  # noqa: S311 - jitter
        raise out_of_time(call, "the call was over before the request was sent")

    def _failed(self, error: S3Error, doing: str) -> BackendError:
        self._troubles.note(error, doing)
        return translate(error, doing, self._place)


class _Nothing(ObjectBody):
    """An empty range."""

    nbytes = 0

    def read_into(self, view: memoryview) -> None:
        """There is nothing to read."""

    def close(self) -> None:
        """Nothing is held."""
