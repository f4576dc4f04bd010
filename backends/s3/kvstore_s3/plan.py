"""Decides whether requests of our own can stand in for boto3's, and what they look like.

boto3 builds and signs one GET, which is caught before it is sent.  Its URL shows scheme, host and
path after every rule of botocore (endpoints, addressing styles, FIPS, dual stack), its
``Authorization`` header shows how it is signed.  Only if our signer makes the same signature of
the same request is the fast path used.
"""

from __future__ import annotations

import hmac
import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import botocore.httpsession  # type: ignore[import-untyped]
import botocore.utils  # type: ignore[import-untyped]

from kvstore_s3.access import Client, keys_of
from kvstore_s3.connection import Endpoint
from kvstore_s3.options import S3Options
from kvstore_s3.signing import ALGORITHM, Signer

_SAMPLE_KEY: Final = "kvstore-sample"
_BEFORE_SEND: Final = "before-send.s3.GetObject"
_EXPRESS_SUFFIX: Final = "--x-s3"  # directory buckets use sessions of their own


@dataclass(frozen=True, slots=True)
class Plan:
    """How to send requests for one bucket.

    Attributes:
        endpoint: Where to connect to.
        host: Value of the ``Host`` header.
        path: Start of every request path, up to the key.
        region: Region to sign for.
    """

    endpoint: Endpoint
    host: str
    path: str
    region: str


class UnfitError(Exception):
    """The fast path cannot do what boto3 does here; the message says why."""


class _CaughtError(Exception):
    """Carries a request out of boto3."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request: Final = request


def make_plan(client: Client, options: S3Options) -> Plan:
    """Find out how to reach the bucket without boto3.

    Raises:
        UnfitError: It has to be boto3.
    """
    if options.bucket.endswith(_EXPRESS_SUFFIX):
        raise UnfitError("directory buckets (S3 Express) authenticate with sessions")
    request = _sample(client, options.bucket)
    url = urlsplit(request.url)
    if url.query or not url.path.endswith(f"/{_SAMPLE_KEY}") or url.hostname is None:
        raise UnfitError(f"boto3 builds URLs of an unknown form for this bucket: {url.scheme}://{url.netloc}{url.path}")
    if any(answer is not None for _, answer in client.s3.meta.events.emit(_BEFORE_SEND, request=request)):
        raise UnfitError("another library answers boto3's requests")  # such as a simulation of AWS
    if botocore.utils.get_environ_proxies(request.url):
        raise UnfitError("a proxy is configured in the environment")
    region = _check_signature(client, request, url)
    endpoint = Endpoint(
        url.hostname,
        url.port or (443 if url.scheme == "https" else 80),
        _tls(client, options) if url.scheme == "https" else None,
        options.connect_timeout,
        options.read_timeout,
    )
    return Plan(endpoint, url.netloc, url.path.removesuffix(_SAMPLE_KEY), region)


def _sample(client: Client, bucket: str) -> Any:
    """Let boto3 build and sign a GET, and take it away before it is sent."""

    def catch(request: Any, **_: Any) -> None:
        raise _CaughtError(request)

    events = client.s3.meta.events
    events.register_first(_BEFORE_SEND, catch, unique_id="kvstore-plan")
    try:
        client.s3.get_object(Bucket=bucket, Key=_SAMPLE_KEY)
    except _CaughtError as caught:
        return caught.request
    finally:
        events.unregister(_BEFORE_SEND, catch, unique_id="kvstore-plan")
    raise UnfitError("boto3 sent a request that could not be caught")


def _check_signature(client: Client, request: Any, url: SplitResult) -> str:
    """Sign boto3's request again and compare; return the region it was signed for."""
    headers = {str(name).lower(): _text(value) for name, value in request.headers.items()}
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    parts = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    scope = parts.get("Credential", "").rsplit("/", 4)
    if scheme != ALGORITHM or len(scope) != 5 or scope[3:] != ["s3", "aws4_request"]:
        raise UnfitError(f"requests are signed in another way ({scheme or 'not at all'})")
    headers.setdefault("host", url.netloc)
    signed = [(name, headers.get(name, "")) for name in parts.get("SignedHeaders", "").split(";")]
    payload = headers.get("x-amz-content-sha256", "")
    ours = Signer(scope[2]).signature(f"GET {url.path}", signed, keys_of(client.credentials), payload)
    if not hmac.compare_digest(ours, parts.get("Signature", "")):
        raise UnfitError("boto3 signs requests for this bucket in a way that is not understood")
    return scope[2]


def _tls(client: Client, options: S3Options) -> ssl.SSLContext:
    """Trust what boto3 trusts."""
    context: ssl.SSLContext = botocore.httpsession.create_urllib3_context()
    context.set_alpn_protocols(["http/1.1"])
    if not options.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    bundle = options.ca_bundle or client.ca_bundle or botocore.httpsession.get_cert_path(verify=True)
    context.load_verify_locations(bundle)
    context.verify_mode = ssl.CERT_REQUIRED
    context.check_hostname = True
    return context


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
