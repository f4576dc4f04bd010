"""What goes wrong with S3, from boto3 and from the wire, sorted into kvstore's words in one place."""

from __future__ import annotations

import enum
import re
import socket
import ssl
from typing import Any, Final

import botocore.exceptions as boto  # type: ignore[import-untyped]

from kvstore.errors import (
    BackendError,
    BackendFullError,
    BackendPermissionError,
    BackendTimeoutError,
    BackendUnavailableError,
    NotSupportedError,
)
from kvstore.types import Call


class Trouble(enum.Enum):
    """Kind of failure; the value is the name of its counter."""

    DENIED = "auth_denied"
    EXPIRED = "expired_credentials"
    CLOCK = "clock_skew"
    CONFIG = "config_errors"
    THROTTLED = "throttled"
    SERVER = "server_errors"
    NETWORK = "network_errors"
    TIMEOUT = "timeouts"
    BODY = "broken_bodies"
    FOREIGN = "foreign_answers"
    FULL = "full"
    REFUSED = "refused_requests"
    CANCELLED = "cancelled"
    """The caller gave up; nobody's fault, neither counted nor logged."""


NO_CREDENTIALS: Final = "NoCredentials"
"""Code of failures that happened before anything was sent."""

_EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_CLOCK: Final = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})
_CONFIG: Final = frozenset(
    {
        "NoSuchBucket",
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "InvalidBucketName",
    }
)
_THROTTLED: Final = frozenset({"SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException", "ServiceBusy"})
_FULL: Final = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityTooLarge"})
_AGAIN: Final = frozenset(
    {Trouble.THROTTLED, Trouble.SERVER, Trouble.NETWORK, Trouble.EXPIRED, Trouble.BODY, Trouble.TIMEOUT}
)

_CODE: Final = re.compile(rb"<Code>([^<]{1,100})</Code>")
_MESSAGE: Final = re.compile(rb"<Message>([^<]{1,300})")
_REGION: Final = re.compile(rb"<Region>([^<]{1,64})</Region>")


class S3Error(Exception):
    """One failed request; internal to this package.

    Attributes:
        trouble: Its kind.
        status: HTTP status; 0 when there was no answer.
        code: Error code of the answer, may be empty.
        region: Region that the answer names, may be empty.
    """

    def __init__(self, trouble: Trouble, detail: str, *, status: int = 0, code: str = "", region: str = "") -> None:
        super().__init__(detail)
        self.trouble: Final = trouble
        self.status: Final = status
        self.code: Final = code
        self.region: Final = region

    @property
    def worth_another(self) -> bool:
        """Whether the same request may well succeed at once."""
        return self.trouble in _AGAIN


def from_answer(status: int, headers: dict[str, str], document: bytes) -> S3Error:
    """Sort an HTTP answer that is no success; ``headers`` have lower-case names."""
    code = _text(_CODE.search(document)) or headers.get("x-amz-error-code", "")
    message = _text(_MESSAGE.search(document))
    region = headers.get("x-amz-bucket-region", "") or _text(_REGION.search(document))
    return _sorted(status, code, message, region)


def from_boto(error: Exception) -> S3Error:  # noqa: PLR0911 - a table of types, first match wins
    """Sort an exception of boto3."""
    if isinstance(error, boto.ClientError):
        return _from_client_error(error.response)
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return S3Error(Trouble.DENIED, f"no usable credentials: {error}", code=NO_CREDENTIALS)
    if isinstance(error, (boto.ConnectTimeoutError, boto.ReadTimeoutError)):
        return S3Error(Trouble.TIMEOUT, str(error))
    if isinstance(error, boto.SSLError):
        return S3Error(Trouble.CONFIG, f"TLS: {error}", code="TLS")
    if isinstance(error, (boto.IncompleteReadError, boto.ResponseStreamingError)):
        return S3Error(Trouble.BODY, str(error))
    if isinstance(error, boto.HTTPClientError):
        return S3Error(Trouble.NETWORK, str(error))
    if isinstance(error, OSError):
        return from_os(error)
    if isinstance(error, RuntimeError):  # botocore's word for renewed credentials that have expired too
        return S3Error(Trouble.DENIED, str(error), code=NO_CREDENTIALS)
    return S3Error(Trouble.REFUSED, f"{type(error).__name__}: {error}")


def from_os(error: OSError) -> S3Error:
    """Sort an error of a socket."""
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return S3Error(Trouble.TIMEOUT, "the server did not answer in time")
    if isinstance(error, ssl.SSLCertVerificationError):
        return S3Error(Trouble.CONFIG, f"TLS: {error.verify_message or error}", code="TLS")
    if isinstance(error, socket.gaierror):
        return S3Error(Trouble.NETWORK, f"name resolution failed: {error.strerror}", code="DNS")
    return S3Error(Trouble.NETWORK, f"{error.strerror or error} ({type(error).__name__})")


def out_of_time(call: Call, detail: str) -> S3Error:
    """Make the failure of a call that is over: cancelled, or past its deadline."""
    return S3Error(Trouble.CANCELLED if call.cancelled else Trouble.TIMEOUT, detail)


def translate(error: S3Error, doing: str, place: str) -> BackendError:
    """Make the public exception for a failure at ``place``."""
    text = f"{place}: {doing}: {error}"
    match error.trouble:
        case Trouble.DENIED | Trouble.EXPIRED:
            return BackendPermissionError(f"{text}; check the credentials and the bucket's policy (kvstore doctor)")
        case Trouble.CLOCK:
            return BackendPermissionError(f"{text}; the clocks of client and server differ: set this machine's clock")
        case Trouble.TIMEOUT | Trouble.CANCELLED:
            return BackendTimeoutError(text)
        case Trouble.FULL:
            return BackendFullError(f"{text}; make room in the bucket or raise its quota")
        case Trouble.REFUSED if error.status == 405:
            return NotSupportedError(f"{text}; this endpoint only serves reads")
        case _:
            return BackendUnavailableError(text)


def _from_client_error(response: dict[str, Any]) -> S3Error:
    error = response.get("Error", {})
    metadata = response.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    code = str(error.get("Code", ""))
    region = str(headers.get("x-amz-bucket-region", "") or error.get("Region", ""))
    # a HEAD has no error document: boto3 then gives the status as the code
    return _sorted(
        int(metadata.get("HTTPStatusCode", 0)), "" if code.isdigit() else code, str(error.get("Message", "")), region
    )


def _sorted(status: int, code: str, message: str, region: str) -> S3Error:
    detail = f"HTTP {status}" + (f" {code}" if code else "") + (f": {message}" if message and message != code else "")
    if region:
        detail += f" (the bucket's region is {region!r})"
    return S3Error(_kind(status, code), detail, status=status, code=code, region=region)


def _kind(status: int, code: str) -> Trouble:  # noqa: PLR0911 - a table, first match wins
    for trouble, codes in (
        (Trouble.EXPIRED, _EXPIRED),
        (Trouble.CLOCK, _CLOCK),
        (Trouble.CONFIG, _CONFIG),
        (Trouble.THROTTLED, _THROTTLED),
        (Trouble.FULL, _FULL),
    ):
        if code in codes:
            return trouble
    if status in {401, 403}:
        return Trouble.DENIED
    if status in {301, 307, 308}:
        return Trouble.CONFIG
    if status in {429, 503}:
        return Trouble.THROTTLED
    if status == 507:
        return Trouble.FULL
    if status >= 500 and status != 501:
        return Trouble.SERVER
    return Trouble.REFUSED if status >= 300 else Trouble.FOREIGN


def _text(match: re.Match[bytes] | None) -> str:
    return match.group(1).decode("utf-8", "replace").strip() if match else ""
