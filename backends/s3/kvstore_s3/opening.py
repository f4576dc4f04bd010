"""Opening a bucket: everything that can be wrong is found out here, before the first block."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from kvstore.errors import ConfigError
from kvstore.types import Call
from kvstore_s3.access import Access
from kvstore_s3.boto_path import BotoPath, ask
from kvstore_s3.data_path import DataPath, Put, Span
from kvstore_s3.errors import NO_CREDENTIALS, S3Error, Trouble, translate
from kvstore_s3.fast_path import FastPath
from kvstore_s3.medium import S3Medium
from kvstore_s3.options import S3Options
from kvstore_s3.plan import UnfitError, make_plan
from kvstore_s3.troubles import Troubles

_OPEN_S: Final = 2.5  # for the probes; with the first look at the bucket a hung endpoint costs under 3 s
_NOT_UNDERSTOOD: Final = frozenset({400, 403, 411, 501})  # answers to a payload without signature or a condition
_PROBE: Final = b"kvstore"

RIGHTS: Final = " (needed: s3:ListBucket on the bucket; s3:GetObject, s3:PutObject, s3:DeleteObject on its objects)"
"""Ends the message about an account that is refused without a reason."""


def open_bucket(options: S3Options, *, tier: str, read_only: bool, logger: logging.Logger) -> S3Medium:
    """Check the credentials and the bucket, and choose the data path.

    Raises:
        ConfigError: An option is wrong, or the bucket is missing or lies in another region.
        BackendPermissionError: There are no credentials, or they are refused.
        BackendUnavailableError: The endpoint cannot be reached.
    """
    access = Access(options)
    try:
        look_at_bucket(access, options)
        notes: list[str] = []
        path, once, refused = choose_path(access, options, Call.within(_OPEN_S), notes, read_only=read_only)
    except S3Error as e:
        access.close()
        raise translate(e, f"opening tier {tier!r}", where(options)) from e
    except BaseException:
        access.close()
        raise
    for note in notes:
        logger.info("%s: %s", where(options), note)
    if refused is not None:
        logger.warning("%s: writing is refused, puts will be too: %s", where(options), refused)
    return S3Medium(access, path, options, Troubles(f"tier {tier!r} ({where(options)})", logger), once=once)


def where(options: S3Options) -> str:
    """Name the bucket for messages."""
    return f"bucket {options.bucket!r} at {options.endpoint_url or 'AWS'}"


def look_at_bucket(access: Access, options: S3Options) -> None:
    """Make sure that the bucket is there, in the expected region, and lets us read.

    Raises:
        ConfigError: It is missing or elsewhere.
        S3Error: It cannot be reached or refuses us.
    """
    region = access.client().region
    try:
        found = ask(access, lambda s3: s3.head_bucket(Bucket=options.bucket))
    except S3Error as e:
        if e.region and e.region != region:
            raise _elsewhere(options, e.region, region) from e
        if e.status == 404:
            _missing(access, options, region, e)
        elif 400 <= e.status < 500 and e.code != NO_CREDENTIALS:
            _explain(access, options, e)
        else:
            raise
        return
    if options.endpoint_url is None and found.get("BucketRegion", region) != region:
        raise _elsewhere(options, found["BucketRegion"], region)


def _elsewhere(options: S3Options, right: str, used: str) -> ConfigError:
    return ConfigError(
        f"backend 's3', option 'region': {where(options)} lies in {right!r}, requests were made for {used!r}; "
        f'set region = "{right}"'
    )


def _missing(access: Access, options: S3Options, region: str, error: S3Error) -> None:
    if not options.create_bucket:
        raise ConfigError(
            f"backend 's3', option 'bucket': {where(options)} does not exist (region {region!r}); "
            "correct the name, create it, or set create_bucket = true"
        ) from error
    elsewhere = options.endpoint_url is None and region != "us-east-1"
    extra = {"CreateBucketConfiguration": {"LocationConstraint": region}} if elsewhere else {}
    ask(access, lambda s3: s3.create_bucket(Bucket=options.bucket, **extra))


def _explain(access: Access, options: S3Options, refused: S3Error) -> None:
    """A HEAD is refused without a word: let a GET say why, or that reading is allowed nevertheless.

    Raises:
        S3Error: What is wrong.
    """
    try:
        BotoPath(access, options).get(probe_key(options), Span(), Call.within(_OPEN_S))
    except S3Error as e:
        if e.trouble is not Trouble.DENIED or e.code not in {"", "AccessDenied"}:
            raise
        raise S3Error(Trouble.DENIED, f"{e}{RIGHTS}", status=e.status, code=e.code) from refused


def choose_path(
    access: Access, options: S3Options, call: Call, notes: list[str], *, read_only: bool
) -> tuple[DataPath, bool, S3Error | None]:
    """Pick the data path and find out whether the server honours ``If-None-Match``.

    Args:
        access: The account.
        options: What the config says.
        call: Limits.
        notes: Gets a line when objects do not travel by the fast path.
        read_only: Write nothing, not even to find out.

    Returns:
        The path, whether puts happen once, and why writing was refused if it was.

    Raises:
        ConfigError: The configured path cannot be used here.
        S3Error: The server fails.
    """
    makers = _data_paths(access, options, notes)
    if read_only:
        return makers[0](), False, None
    refused: S3Error | None = None
    for make in makers:
        path = make()
        try:
            return path, _try_put_once(access, path, options, call), None
        except S3Error as e:
            path.close()
            if e.status not in _NOT_UNDERSTOOD:
                raise
            refused = e
        except BaseException:
            path.close()
            raise
    return makers[0](), False, refused  # refused however it was sent: an account that may only read


def _data_paths(access: Access, options: S3Options, notes: list[str]) -> list[Callable[[], DataPath]]:
    """Ways to move objects, best first."""
    makers: list[Callable[[], DataPath]] = []
    if options.data_path != "boto3":
        try:
            plan = make_plan(access.client(), options)
        except UnfitError as e:
            if options.data_path == "fast":
                raise ConfigError(f"backend 's3', option 'data_path': 'fast' is not possible here: {e}") from e
            notes.append(f"objects travel through boto3: {e}")
        else:
            makers.append(partial(FastPath, access, plan, options, sign_payload=False))
            if plan.endpoint.tls is None:  # over TLS no server wants the payload signed
                makers.append(partial(FastPath, access, plan, options, sign_payload=True))
    if options.data_path != "fast":
        makers.append(partial(BotoPath, access, options))
    return makers


def _try_put_once(access: Access, path: DataPath, options: S3Options, call: Call) -> bool:
    """Write a small object twice: the second one must be refused by a server that honours the condition."""
    key = probe_key(options)
    put = Put((_PROBE,), len(_PROBE), 0, once=options.put_once != "never")
    try:
        path.put(key, put, call)
        return not path.put(key, put, call) if options.put_once == "auto" else put.once
    except S3Error as e:
        if options.put_once != "auto" or e.status not in {400, 501}:
            raise
        path.put(key, replace(put, once=False), call)  # it was the condition
        return False
    finally:
        with contextlib.suppress(S3Error):  # an account that may not delete leaves one tiny object
            ask(access, lambda s3: s3.delete_object(Bucket=options.bucket, Key=key))


def probe_key(options: S3Options) -> str:
    """Return a key that nobody has used."""
    return f"{options.prefix}/probes/{secrets.token_hex(8)}".lstrip("/")
