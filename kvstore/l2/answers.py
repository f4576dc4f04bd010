"""Answers of backends: whether they have the right form, and whether they mean that the medium failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from kvstore.errors import (
    BackendError,
    BackendPermissionError,
    BackendTimeoutError,
    BackendUnavailableError,
    PluginError,
)
from kvstore.types import Call, Presence, PutStatus, ReadStatus

T = TypeVar("T")

_FAILURES: Final[dict[ReadStatus | PutStatus, type[BackendError]]] = {
    ReadStatus.TIMEOUT: BackendTimeoutError,
    PutStatus.TIMEOUT: BackendTimeoutError,
    ReadStatus.UNAVAILABLE: BackendUnavailableError,
    PutStatus.UNAVAILABLE: BackendUnavailableError,
    ReadStatus.DENIED: BackendPermissionError,
    PutStatus.DENIED: BackendPermissionError,
}
"""Statuses that mean the medium failed; when nothing of a call went well they count like an error."""


def checked(operation: str, answer: list[T], expected: int) -> list[T]:
    """Return a backend's answer if it is a list of ``expected`` items; a plugin may answer anything.

    Raises:
        PluginError: It is not.
    """
    if _wrong_form(answer, expected):
        msg = f"{operation} answered {answer!r:.80} for {expected} names; expected a list of one status each"
        raise PluginError(msg)
    return answer


def raise_failure(statuses: Sequence[ReadStatus | PutStatus], tier: str) -> None:
    """Raise if any status says that the medium failed; for calls of which nothing went well.

    Raises:
        BackendError: Of the class that fits the first such status.
    """
    for status, error in _FAILURES.items():
        if status in statuses:
            msg = f"the backend of tier {tier!r} answered {status.value}"
            raise error(msg)


def raise_unknown(found: Sequence[Presence], call: Call, tier: str) -> None:
    """Raise if nothing is known of any block, which means that the medium failed.

    Raises:
        BackendError: A timeout when the call is over by now.
    """
    if found and all(presence is Presence.UNKNOWN for presence in found):
        error = BackendTimeoutError if call.stop() else BackendUnavailableError
        msg = f"the backend of tier {tier!r} could not say of any block whether it is there"
        raise error(msg)


def _wrong_form(answer: object, expected: int) -> bool:
    return not isinstance(answer, list) or len(answer) != expected
