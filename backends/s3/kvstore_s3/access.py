"""boto3's session, client and credentials of one process."""

from __future__ import annotations

import functools
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import boto3.session  # type: ignore[import-untyped]
import botocore.exceptions  # type: ignore[import-untyped]
import botocore.loaders  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]

from kvstore.errors import ConfigError
from kvstore_s3.errors import NO_CREDENTIALS, S3Error, Trouble
from kvstore_s3.options import S3Options
from kvstore_s3.signing import Keys

DEFAULT_REGION: Final = "us-east-1"  # what S3-compatible servers expect; AWS answers with the right one
CREDENTIAL_FAILURES: Final = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    OSError,
    RuntimeError,  # what botocore raises when the renewed ones have expired too
)
_BESIDES: Final = 4  # connections for listings and deletions, which go through boto3 beside the objects
_RENEW_EVERY_S: Final = 5.0  # a token that is expired for good must not cost a new session a request


@dataclass(frozen=True, slots=True)
class Client:
    """One client with its origin; immutable, used by all threads of one process.

    Attributes:
        s3: boto3's low-level client; thread-safe.
        credentials: Refreshable credentials of the session, never frozen ones.
        region: Region that requests are signed for.
        ca_bundle: File of certificate authorities that the AWS configuration names, None for the default.
        pid: Process that made it.
    """

    s3: Any
    credentials: Any
    region: str
    ca_bundle: str | None
    pid: int


def keys_of(credentials: Any) -> Keys:
    """Ask botocore's credentials, which refresh themselves when they are about to expire.

    Raises:
        S3Error: They cannot be refreshed.
    """
    try:
        frozen = credentials.get_frozen_credentials()
    except CREDENTIAL_FAILURES as e:
        raise S3Error(Trouble.DENIED, f"the credentials cannot be renewed: {e}", code=NO_CREDENTIALS) from e
    return Keys(frozen.access_key, frozen.secret_key, frozen.token)


class Access:
    """Makes the client when it is first needed, again after a fork, and when a token has expired.

    Thread-safe; a child process never touches sockets or locks of its parent.
    """

    def __init__(self, options: S3Options) -> None:
        self._options: Final = options
        self._made: Client | None = None
        self._closed = False
        self._renewing = threading.Lock()
        self._renewed_at = -_RENEW_EVERY_S

    def client(self) -> Client:
        """Return the client of this process.

        Raises:
            ConfigError: The AWS configuration cannot be used.
            S3Error: There are no credentials, or it was closed: what is still under way makes no new client.
        """
        if self._closed:
            raise S3Error(Trouble.CANCELLED, "the tier is closed")
        made = self._made
        if made is None or made.pid != os.getpid():  # two threads may both make one: the later one stays
            self._renewing = threading.Lock()
            self._made = made = _make(self._options)
        return made

    def renew(self, expired: Client) -> bool:
        """Ask the credential chain again because the server called a token expired; whether that was done."""
        with self._renewing:
            if self._made is not expired:
                return True  # another thread was faster
            if time.monotonic() - self._renewed_at < _RENEW_EVERY_S:
                return False
            self._renewed_at = time.monotonic()
            self._made = _make(self._options)
            _close(expired.s3)  # requests under way end on their own connections
            return True

    def close(self) -> None:
        """Close boto3's connections."""
        self._closed = True
        made, self._made = self._made, None
        if made is not None and made.pid == os.getpid():
            _close(made.s3)


def _close(s3: Any) -> None:
    """Close a client and its idle connections.

    boto3 only forgets its pools, and urllib3 closes them when the garbage collector comes by: the tracebacks
    of failed requests keep them in cycles.  Where the pools cannot be found it stays at that.
    """
    session = getattr(getattr(s3, "_endpoint", None), "http_session", None)
    pools = getattr(getattr(session, "_manager", None), "pools", None) or {}
    found = [pools.get(key) for key in pools.keys()]  # noqa: SIM118 - urllib3's container cannot be iterated
    s3.close()
    for pool in found:
        if pool is not None:
            pool.close()


def _make(options: S3Options) -> Client:
    try:
        core = botocore.session.Session(profile=options.profile)
        core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
        if options.access_key_id is not None:
            core.set_credentials(options.access_key_id, options.secret_access_key, options.session_token)
        session = boto3.session.Session(botocore_session=core)
        region = options.region or session.region_name or DEFAULT_REGION
        client = session.client(
            "s3",
            region_name=region,
            endpoint_url=options.endpoint_url,
            verify=(options.ca_bundle or None) if options.verify else False,  # None: as the AWS configuration says
            config=_config(options),
        )
        credentials = session.get_credentials()
        ca_bundle = options.ca_bundle or core.get_config_variable("ca_bundle")
    except botocore.exceptions.ProfileNotFound as e:
        raise ConfigError(f"backend 's3', option 'profile': {e}") from e
    except (botocore.exceptions.CredentialRetrievalError, botocore.exceptions.PartialCredentialsError) as e:
        raise S3Error(Trouble.DENIED, f"the credentials cannot be had: {e}", code=NO_CREDENTIALS) from e
    except (botocore.exceptions.BotoCoreError, ValueError) as e:
        raise ConfigError(f"backend 's3': the AWS configuration cannot be used: {e}") from e
    if credentials is None:
        client.close()
        raise S3Error(
            Trouble.DENIED,
            "no credentials were found in the options, the environment, the AWS files or an instance role",
            code=NO_CREDENTIALS,
        )
    return Client(client, credentials, region, ca_bundle, os.getpid())


@functools.cache
def _loader(data_path: str | None) -> Any:
    """Return botocore's reader of its own data, kept: parsing the model of S3 is half of making a client."""
    return botocore.loaders.create_loader(data_path)


def _config(options: S3Options) -> Config:
    s3: dict[str, Any] = {"addressing_style": options.addressing_style}
    if options.endpoint_url is not None and options.addressing_style == "auto":
        s3["addressing_style"] = "path"  # servers without wildcard DNS are the common case
    if options.endpoint_url is None or options.endpoint_url.startswith("https:"):
        s3["payload_signing_enabled"] = False  # TLS protects the body, records carry checksums
    return Config(
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        max_pool_connections=options.connections + _BESIDES,
        # tries are counted here, within the call's deadline; botocore waits up to 20 s between its own
        retries={"total_max_attempts": 1, "mode": "standard"},
        s3=s3,
        # CRC trailers break many S3-compatible servers, and records carry checksums of their own
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        user_agent_extra="kvstore",
    )
