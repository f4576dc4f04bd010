"""Outcome of a call: a value, or a code with a reason."""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class StatusCodes(Enum):
    """How a call ended."""

    OK = auto()
    ERROR = auto()
    NOT_FOUND = auto()
    INVALID = auto()
    OUT_OF_MEMORY = auto()
    TIMEOUT = auto()
    DENIED = auto()
    CANCELLED = auto()


class Status(Generic[T]):
    """A value, or why there is none; every data call returns one.

    Args:
        code_or_value: A code; or the value of a success; or another status, which is copied.
        value: The value of a success, or the message or exception of a failure.

    Attributes:
        error_code: How the call ended.
        value: The value, message or exception.
        trace: The traceback, when the status was made from an exception that was being handled.

    Raises:
        ValueError: Two values were given.
    """

    error_code: StatusCodes
    value: Any
    trace: str | None = None

    def __init__(self, code_or_value: StatusCodes | T | Status[Any], value: Any = None) -> None:
        if isinstance(code_or_value, Status):
            self.error_code, self.value = code_or_value.error_code, code_or_value.value
            self.trace = code_or_value.trace
            return
        if not isinstance(code_or_value, StatusCodes):
            if value is not None:
                msg = f"Status got the values {code_or_value!r} and {value!r}; give one, or a code first"
                raise ValueError(msg)
            self.error_code, self.value = StatusCodes.OK, code_or_value
            return
        self.error_code, self.value = code_or_value, value
        if isinstance(value, Exception):
            self.trace = traceback.format_exc()

    @classmethod
    def ok(cls, value: T | None = None) -> Status[T]:
        """Make a success."""
        return cls(StatusCodes.OK, value)

    @classmethod
    def error(cls, error_code: StatusCodes, message_or_exception: str | Exception | None = None) -> Status[T]:
        """Make a failure."""
        return cls(error_code, message_or_exception)

    def get(self, default: T | None = None) -> T:
        """The value of a success, ``default`` for a failure.

        Raises:
            ValueError: A success without a value was asked for it.
        """
        if self.error_code is not StatusCodes.OK:
            return cast("T", default)
        if self.value is None:
            msg = "this status is OK and has no value; ask is_ok() instead of get()"
            raise ValueError(msg)
        return cast("T", self.value)

    def is_ok(self) -> bool:
        """Whether there is a value."""
        return self.error_code is StatusCodes.OK

    def is_error(self) -> bool:
        """Whether something failed that no other code names."""
        return self.error_code is StatusCodes.ERROR

    def is_not_found(self) -> bool:
        """Whether not one block was there: a miss."""
        return self.error_code is StatusCodes.NOT_FOUND

    def is_invalid(self) -> bool:
        """Whether the arguments make no sense."""
        return self.error_code is StatusCodes.INVALID

    def is_out_of_memory(self) -> bool:
        """Whether everything in L1 is in use."""
        return self.error_code is StatusCodes.OUT_OF_MEMORY

    def is_timeout(self) -> bool:
        """Whether a deadline passed."""
        return self.error_code is StatusCodes.TIMEOUT

    def is_denied(self) -> bool:
        """Whether a bound refused the call."""
        return self.error_code is StatusCodes.DENIED

    def is_cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self.error_code is StatusCodes.CANCELLED

    def raise_if_has_exception(self) -> None:
        """Raise the exception that the status carries, if any."""
        if isinstance(self.value, Exception):
            raise self.value

    def raise_if_not_ok(self) -> None:
        """Raise unless the call succeeded.

        Raises:
            RuntimeError: It failed without an exception of its own.
        """
        self.raise_if_has_exception()
        if not self.is_ok():
            raise RuntimeError(str(self))

    @staticmethod
    def capture_exception(function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function (or coroutine function) so that it returns exceptions as ERROR."""

        @functools.wraps(function)
        def captured(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except AssertionError:
                raise
            except Exception as e:  # noqa: BLE001 - what the decorator is for
                return Status(StatusCodes.ERROR, e)

        @functools.wraps(function)
        async def captured_later(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except AssertionError:
                raise
            except Exception as e:  # noqa: BLE001 - what the decorator is for
                return Status(StatusCodes.ERROR, e)

        return captured_later if asyncio.iscoroutinefunction(function) else captured

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Status):
            return NotImplemented
        return (self.error_code, self.value) == (other.error_code, other.value)

    __hash__ = None  # type: ignore[assignment]  # values are anything

    def __repr__(self) -> str:
        value = "" if self.value is None else f", value={self.value}"
        trace = "" if self.trace is None else f", trace:\n{self.trace}"
        return f"Status(error_code={self.error_code}{value}){trace}"
