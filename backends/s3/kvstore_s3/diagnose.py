"""What ``kvstore doctor`` says about a bucket: name, network, TLS, credentials, clock, rights, speed."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import botocore.exceptions  # type: ignore[import-untyped]

from kvstore.backend import BackendContext, Finding
from kvstore.errors import ConfigError
from kvstore.types import Call
from kvstore_s3.access import Access, keys_of
from kvstore_s3.boto_path import BotoPath, ask
from kvstore_s3.data_path import DataPath, Put, Span, http_time
from kvstore_s3.errors import S3Error, Trouble
from kvstore_s3.lifecycle import lifecycle_rules, refresh_advice
from kvstore_s3.opening import RIGHTS, choose_path, look_at_bucket, probe_key, where
from kvstore_s3.options import S3Options

_LIMIT_S: Final = 8.0  # doctor waits 15 s for a plugin
_SKEW_PROBLEM_S: Final = 300.0  # AWS refuses at 900 s; a clock that drifts gets there
_SKEW_WARNING_S: Final = 30.0
_SLOW_MS: Final = 100.0  # beyond it a restore is bound by requests, not by the link
_SAMPLE: Final = bytes(4096)

_ADVICE: Final = {
    Trouble.DENIED: "allow s3:ListBucket on the bucket and s3:GetObject, s3:PutObject, s3:DeleteObject on its objects",
    Trouble.EXPIRED: "renew the session token, or let a role or profile do it",
    Trouble.CLOCK: "set this machine's clock (NTP)",
    Trouble.CONFIG: "check the options 'endpoint_url', 'bucket', 'region' and 'ca_bundle'",
    Trouble.NETWORK: "check the option 'endpoint_url', the network and the firewall",
    Trouble.TIMEOUT: "check the network and the server's load; 'connect_timeout' and 'read_timeout' set the limits",
    Trouble.THROTTLED: "the server asks for fewer requests: lower 'connections', or raise its limits",
    Trouble.FULL: "make room in the bucket or raise its quota",
}


def diagnose(context: BackendContext) -> Sequence[Finding]:
    """Look at the bucket from outside to inside; stops at the first thing that hides the rest."""
    options = context.options
    if not isinstance(options, S3Options):
        return [Finding("problem", f"options must be S3Options, not {type(options).__name__}")]
    diagnosis = Diagnosis(options, read_only=context.read_only)
    with contextlib.suppress(_StopError):
        diagnosis.run()
    return diagnosis.findings


class _StopError(Exception):
    """What was found makes every later step fail."""


class Diagnosis:
    """One look at one bucket; single use."""

    def __init__(self, options: S3Options, *, read_only: bool) -> None:
        self.findings: Final[list[Finding]] = []
        self._options: Final = options
        self._read_only: Final = read_only
        self._call: Final = Call.within(_LIMIT_S)

    def run(self) -> None:
        """Take all steps.

        Raises:
            _StopError: A step failed for good.
        """
        try:
            access = Access(self._options)
            client = access.client()
        except ConfigError as e:
            self._stop(str(e), "correct the config")
        except S3Error as e:
            self._stop(f"credentials: {e}", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role")
        else:
            try:
                self._say("ok", f"credentials come from {_origin(client.credentials)}; region {client.region!r}")
                self._network(client.s3.meta.endpoint_url)
                self._clock(access)
                self._bucket(access)
                self._rights(access)
                self._expiry(access)
            finally:
                access.close()

    def _say(self, level: Literal["ok", "warning", "problem"], what: str, advice: str = "") -> None:
        self.findings.append(Finding(level, what, advice))

    def _stop(self, what: str, advice: str) -> None:
        self._say("problem", what, advice)
        raise _StopError

    def _failed(self, what: str, error: S3Error, *, stop: bool = True) -> None:
        self._say(
            "problem", f"{what}: {error}".removesuffix(RIGHTS), _ADVICE.get(error.trouble, "see the server's log")
        )
        if stop:
            raise _StopError

    def _network(self, url: str) -> None:
        """Resolve the endpoint's name and connect to it."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        try:
            addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except OSError as e:
            self._stop(f"DNS: the name {host!r} cannot be resolved: {e}", "check the option 'endpoint_url' and the DNS")
        else:
            began = time.monotonic()
            try:
                socket.create_connection((host, port), self._options.connect_timeout).close()
            except OSError as e:
                text = f"{host} ({', '.join(sorted(addresses))}) port {port} cannot be reached: {e}"
                self._stop(text, "is the server running, is the port right, does a firewall stand between?")
            spent_ms = (time.monotonic() - began) * 1e3
            self._say("ok", f"{host} port {port} answers in {spent_ms:.1f} ms ({parts.scheme})")

    def _clock(self, access: Access) -> None:
        """Compare clocks by the Date of any answer, also of a refusal."""
        try:
            answer = access.client().s3.head_bucket(Bucket=self._options.bucket)
        except botocore.exceptions.ClientError as e:
            answer = e.response
        except botocore.exceptions.BotoCoreError:
            return  # the next step asks again and says what is wrong
        date = http_time(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))
        if not date:
            return
        skew_s = time.time() - date
        what = f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"
        if abs(skew_s) >= _SKEW_PROBLEM_S:
            self._say("problem", what, "set this machine's clock (NTP): S3 refuses requests that are 15 minutes off")
        elif abs(skew_s) >= _SKEW_WARNING_S:
            self._say("warning", what, "set this machine's clock (NTP)")

    def _bucket(self, access: Access) -> None:
        try:
            look_at_bucket(access, replace(self._options, create_bucket=False))
        except ConfigError as e:
            if self._options.create_bucket and "does not exist" in str(e):
                self._say("ok", f"{where(self._options)} does not exist yet; opening the tier creates it")
                raise _StopError from e
            self._stop(str(e), "correct the config")
        except S3Error as e:
            self._failed(where(self._options), e)
        self._say("ok", f"{where(self._options)} is there")

    def _rights(self, access: Access) -> None:
        """Do once what a tier does, timing each action with a small object."""
        try:
            path, once = self._path(access)
        except S3Error as e:
            self._failed("writing a test object (s3:PutObject)", e)
            return
        try:
            self._say("ok", f"objects travel by the {path.name} data path")
            key = probe_key(self._options)
            if not self._read_only:
                if not once and self._options.put_once == "auto":
                    advice = "harmless: blocks that several processes store at once are written more than once"
                    self._say("warning", "the server ignores If-None-Match, so nothing is put once", advice)
                self._timed(
                    "PUT", "s3:PutObject", lambda: path.put(key, Put((_SAMPLE,), 4096, 1, once=False), self._call)
                )
            self._timed("HEAD", "s3:GetObject", lambda: path.head(key, self._call))
            self._timed("GET", "s3:GetObject", lambda: self._get(path, key))
            self._timed("LIST", "s3:ListBucket", lambda: ask(access, self._list))
            if not self._read_only:
                self._timed("DELETE", "s3:DeleteObject", lambda: ask(access, lambda s3: self._delete(s3, key)))
        finally:
            path.close()

    def _path(self, access: Access) -> tuple[DataPath, bool]:
        notes: list[str] = []
        path, once, refused = choose_path(access, self._options, self._call, notes, read_only=self._read_only)
        for note in notes:
            advice = "slower by a factor of 3 to 5 per core" if isinstance(path, BotoPath) else ""
            self._say("warning" if advice else "ok", note, advice)
        if refused is not None:
            self._failed("writing is refused (s3:PutObject)", refused, stop=False)
        return path, once

    def _timed(self, verb: str, action: str, request: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            request()
        except S3Error as e:
            advice = (
                f"allow {action} for these credentials" if e.trouble is Trouble.DENIED else _ADVICE.get(e.trouble, "")
            )
            self._say("problem", f"{verb} ({action}): {e}", advice)
            return
        spent_ms = (time.monotonic() - began) * 1e3
        slow = spent_ms > _SLOW_MS
        advice = "raise 'connections' so that more requests are on their way at once" if slow else ""
        self._say("warning" if slow else "ok", f"a {verb} takes {spent_ms:.1f} ms", advice)

    def _get(self, path: DataPath, key: str) -> None:
        stream = path.get(key, Span(), self._call)
        if stream is None:
            return
        try:
            view = memoryview(bytearray(stream.nbytes))
            while view:
                got = stream.read_some(view, self._call)
                if not got:
                    raise S3Error(Trouble.BODY, "the body ended early")
                view = view[got:]
        finally:
            stream.close()

    def _list(self, s3: Any) -> Any:
        return s3.list_objects_v2(Bucket=self._options.bucket, Prefix=self._options.prefix, MaxKeys=1)

    def _delete(self, s3: Any, key: str) -> Any:
        return s3.delete_object(Bucket=self._options.bucket, Key=key)

    def _expiry(self, access: Access) -> None:
        """Say whether anything ever removes objects, and whether it would remove those in use."""
        try:
            rules = lifecycle_rules(access, self._options)
        except S3Error:
            return  # many accounts may not look at it, many servers have none
        if not any(rule.covers(self._options) for rule in rules):
            advice = "run python -m kvstore_s3 lifecycle CONFIG --days N, or give the tier a capacity"
            self._say("warning", "no lifecycle rule expires this tier's objects", advice)
            return
        advice = refresh_advice(self._options, rules)
        self._say("warning" if advice else "ok", "a lifecycle rule expires this tier's objects", advice)


def _origin(credentials: Any) -> str:
    """Say where credentials come from, and which they are, without showing them."""
    method = str(getattr(credentials, "method", "an unknown place"))
    origin = "the config" if method == "explicit" else method
    with contextlib.suppress(S3Error):
        return f"{origin} (access key ...{keys_of(credentials).access_key[-4:]})"
    return origin
