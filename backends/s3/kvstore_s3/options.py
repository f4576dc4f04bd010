"""Options of the S3 backend; importable without boto3."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from kvstore.errors import ConfigError
from kvstore.types import Seconds, option

AddressingStyle = Literal["auto", "path", "virtual"]
DataPathName = Literal["auto", "boto3", "fast"]
PutOnce = Literal["auto", "always", "never"]
Sse = Literal["AES256", "aws:kms"]

MAX_PACK_BLOCKS: Final = 16  # packs never cross an absolute multiple of 16 blocks
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*", re.ASCII)
_MAX_PREFIX_CHARS: Final = 256  # leaves half of the 512 characters of a key to what follows it
_MAX_BUCKET_CHARS: Final = 63


@dataclass(frozen=True, slots=True)
class S3Options:
    """Keys of an ``[[l2]]`` section with ``backend = "s3"``, besides the core's own."""

    bucket: str = option(required=True, doc="Name of the bucket, or ARN of an access point.")
    prefix: str = option("kvstore", doc="Start of every key, without slashes at its ends; may be empty.")
    endpoint_url: str | None = option(
        None, doc="URL of an S3-compatible server, such as http://127.0.0.1:9000; AWS if not given."
    )
    region: str | None = option(
        None, doc="Region of the bucket; from the AWS configuration if not given, us-east-1 if that has none."
    )
    addressing_style: AddressingStyle = option(
        "auto",
        doc="Where the bucket's name goes: path (host/bucket/key), virtual (bucket.host/key); "
        "auto: path for a custom endpoint, virtual for AWS.",
    )
    profile: str | None = option(None, doc="Profile of the AWS configuration files to take credentials from.")
    access_key_id: str | None = option(
        None,
        secret=True,
        doc="Access key; the normal AWS chain (environment, files, roles) if not given, which also refreshes itself.",
    )
    secret_access_key: str | None = option(None, secret=True, doc="Secret that belongs to access_key_id.")
    session_token: str | None = option(None, secret=True, doc="Session token that belongs to access_key_id.")
    storage_class: str | None = option(None, doc="Storage class of new objects, such as STANDARD_IA.")
    sse: Sse | None = option(None, doc="Server-side encryption to ask for; the bucket's default if not given.")
    sse_kms_key_id: str | None = option(None, doc='Key for sse = "aws:kms"; the account\'s default key if not given.')
    put_once: PutOnce = option(
        "auto",
        doc="Leave stored objects alone with If-None-Match: auto asks the server at open whether it honours it.",
    )
    pack: int = option(
        16, doc="Blocks in one object at most: 1, 2, 4, 8 or 16; 1 stores each block alone. Blocks from 4MiB are alone."
    )
    connections: int = option(16, doc="Connections at most, 1 to 256; also how many requests run at once.")
    connect_timeout: Seconds = option(0.5, doc="Longest time for making a connection.")
    read_timeout: Seconds = option(2.0, doc="Longest silence of the server within an answer.")
    attempts: int = option(2, doc="Times a request is sent in all, 1 to 5, while the call's deadline allows it.")
    verify: bool = option(default=True, doc="Check the server's TLS certificate.")
    ca_bundle: str | None = option(
        None,
        doc="File of the certificate authorities to trust; if not given, that of the AWS configuration or botocore's.",
    )
    data_path: DataPathName = option(
        "auto",
        doc="How objects travel: fast (own connections), boto3, or auto: fast where it can reproduce boto3's requests.",
    )
    positive_ttl: Seconds = option(
        30.0, doc="How long a name may be called stored without asking; a read that finds nothing ends it at once."
    )
    negative_ttl: Seconds = option(1.0, doc="How long an absent name is remembered as absent; 0 asks every time.")
    refresh_after: Seconds | None = option(
        None,
        doc="Age at which an object in use is copied onto itself, so that neither the capacity nor a bucket lifecycle "
        "takes it: half of the lifecycle's days. 0 never does; if not given: 6 hours with a capacity, else never.",
    )
    create_bucket: bool = option(default=False, doc="Create the bucket when it does not exist.")

    def __post_init__(self) -> None:
        """Check what types alone cannot say.

        Raises:
            ConfigError: A value is out of range or contradicts another.
        """
        _check_place(self)
        _check_endpoint(self)
        _check_numbers(self)
        _check_secrets(self)


def wrong(name: str, value: object, expected: str) -> ConfigError:
    """Make the error for one option; never called with a secret's value."""
    return ConfigError(f"backend 's3', option {name!r}: got {value!r}; expected {expected}")


def _check_place(options: S3Options) -> None:
    if not options.bucket or "/" in options.bucket.rpartition(":")[2].removeprefix("accesspoint/"):
        raise wrong("bucket", options.bucket, "a bucket's name without a slash (the folder is option 'prefix')")
    if not options.bucket.startswith("arn:") and not 3 <= len(options.bucket) <= _MAX_BUCKET_CHARS:
        raise wrong("bucket", options.bucket, f"3 to {_MAX_BUCKET_CHARS} characters, as S3 wants for a bucket's name")
    if options.prefix and (len(options.prefix) > _MAX_PREFIX_CHARS or not _PREFIX.fullmatch(options.prefix)):
        raise wrong("prefix", options.prefix, f"up to {_MAX_PREFIX_CHARS} of A-Z a-z 0-9 _ . = - and single slashes")
    if any(part.strip(".") == "" for part in options.prefix.split("/")) and options.prefix:
        raise wrong("prefix", options.prefix, "no part that consists of dots")


def _check_secrets(options: S3Options) -> None:
    if (options.access_key_id is None) != (options.secret_access_key is None):
        missing = "secret_access_key" if options.secret_access_key is None else "access_key_id"
        raise wrong(missing, None, "a value, because the other half of the pair is given")
    if options.session_token is not None and options.access_key_id is None:
        raise wrong("access_key_id", None, "a value, because option 'session_token' is given")
    if options.sse_kms_key_id is not None and options.sse != "aws:kms":
        raise wrong("sse", options.sse, "'aws:kms', because option 'sse_kms_key_id' is given")


def _check_endpoint(options: S3Options) -> None:
    url = options.endpoint_url
    if url is None:
        return
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, an unclosed bracket
        raise wrong("endpoint_url", url, "a URL such as http://127.0.0.1:9000") from None
    if "@" in parts.netloc:
        raise ConfigError(
            "backend 's3', option 'endpoint_url': it holds a user name or password; "
            "credentials belong in the AWS configuration or in 'access_key_id' and 'secret_access_key'"
        )
    if not usable or parts.query or parts.fragment:
        raise wrong("endpoint_url", url, "a URL such as http://127.0.0.1:9000")


def _check_numbers(options: S3Options) -> None:
    if options.pack not in {1, 2, 4, 8, MAX_PACK_BLOCKS}:
        raise wrong("pack", options.pack, "1, 2, 4, 8 or 16")
    for name, low, high in (
        ("connections", 1, 256),
        ("attempts", 1, 5),
        ("connect_timeout", 0.01, 60.0),
        ("read_timeout", 0.01, 60.0),
        ("positive_ttl", 0.0, 3600.0),
        ("negative_ttl", 0.0, 3600.0),
        ("refresh_after", 0.0, 10 * 365 * 86400.0),
    ):
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise wrong(name, value, f"{low} to {high}")
