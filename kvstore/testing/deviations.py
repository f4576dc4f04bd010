"""Suites whose tests cannot be weakened silently, and the way to deviate in the open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_REASON: Final = "__kvstore_deviates__"


def deviates(reason: str) -> Callable[[F], F]:
    """Mark a test that replaces one of a suite's, and say why the law does not hold here.

    Args:
        reason: One sentence for whoever reads the test report; must not be empty.

    Raises:
        TypeError: ``reason`` is missing.

    Example:
        >>> @deviates("the medium rounds ages to whole days")
        ... def test_scan_tells_the_last_use(self): ...
    """
    if callable(reason) or not reason.strip():
        msg = '@deviates needs a reason: @deviates("why the law does not hold here")'
        raise TypeError(msg)

    def mark(test: F) -> F:
        setattr(test, _REASON, reason)
        return test

    return mark


def deviation(test: object) -> str:
    """Return the reason that :func:`deviates` gave to a test; empty for all others."""
    return str(getattr(test, _REASON, ""))


class Suite:
    """Root of every conformance suite: a subclass may add tests, but replace none of the suite's.

    Raises:
        TypeError: A subclass redefines an inherited test without :func:`deviates`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in vars(cls).items():
            inherited = name.startswith("test_") and any(hasattr(base, name) for base in cls.__mro__[1:])
            if inherited and not deviation(member):
                msg = f'{cls.__qualname__} redefines the law {name}; if it must, say why: @deviates("reason")'
                raise TypeError(msg)
