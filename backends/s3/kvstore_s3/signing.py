"""AWS Signature Version 4 for requests without a query string, with the parts that repeat kept ready.

Written after "Signature Version 4 signing process" of the AWS documentation.  botocore's signer
does the same for any request at about ten times the cost; at open the two are compared on a
request of the session at hand (see ``plan.py``), and the tests compare them for every verb.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNSIGNED: Final = "UNSIGNED-PAYLOAD"
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
ALGORITHM: Final = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class Keys:
    """One frozen look at the credentials; used for one request and dropped."""

    access_key: str
    secret_key: str
    token: str | None


def payload_sha256(buffers: Iterable[memoryview | bytes]) -> str:
    """Hash a gather list."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


class Signer:
    """Signs requests for one region; thread-safe."""

    def __init__(self, region: str) -> None:
        self._region: Final = region
        self._key: tuple[str, str, bytes] = ("", "", b"")  # day, secret, signing key: replaced as one
        self._stamp: tuple[int, str] = (-1, "")

    def now(self) -> str:
        """Return the time as SigV4 writes it."""
        second = int(time.time())
        kept, text = self._stamp
        if kept != second:
            text = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
            self._stamp = (second, text)
        return text

    def head(self, request: str, host: str, headers: Mapping[str, str], keys: Keys, *, payload: str = UNSIGNED) -> str:
        """Return the request line and all signed headers, without the empty line.

        Args:
            request: HTTP verb and path, with a space between; the path as it goes over the wire.
            host: Value of the ``Host`` header.
            headers: More headers to sign; names in lower case, in order.
            keys: Whose request it is.
            payload: SHA-256 of the body in hexadecimal, or :data:`UNSIGNED`.
        """
        stamp = self.now()
        fields = {**headers, "host": host, "x-amz-content-sha256": payload, "x-amz-date": stamp}
        if keys.token is not None:
            fields["x-amz-security-token"] = keys.token
        signed = sorted(fields.items())
        names = ";".join(name for name, _ in signed)
        signature = self.signature(request, signed, keys, payload)
        lines = "\r\n".join(f"{name}: {value}" for name, value in signed)
        return (
            f"{request} HTTP/1.1\r\n{lines}\r\n"
            f"authorization: {ALGORITHM} Credential={keys.access_key}/{stamp[:8]}/{self._region}/s3/aws4_request, "
            f"SignedHeaders={names}, Signature={signature}\r\n"
        )

    def signature(self, request: str, signed: Sequence[tuple[str, str]], keys: Keys, payload: str) -> str:
        """Return the signature over a request line and sorted headers that hold ``x-amz-date``."""
        stamp = next(value for name, value in signed if name == "x-amz-date")
        lines = "".join(f"{name}:{value}\n" for name, value in signed)
        names = ";".join(name for name, _ in signed)
        method, _, path = request.partition(" ")
        canonical = f"{method}\n{path}\n\n{lines}\n{names}\n{payload}"
        day = stamp[:8]
        text = (
            f"{ALGORITHM}\n{stamp}\n{day}/{self._region}/s3/aws4_request\n"
            f"{hashlib.sha256(canonical.encode()).hexdigest()}"
        )
        return hmac.digest(self._signing_key(day, keys.secret_key), text.encode(), "sha256").hex()

    def _signing_key(self, day: str, secret: str) -> bytes:
        kept_day, kept_secret, key = self._key
        if kept_day != day or kept_secret != secret:
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._key = (day, secret, key)
        return key
