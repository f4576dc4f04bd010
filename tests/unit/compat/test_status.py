from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.compat.aibrix import Status, StatusCodes


def test_a_success_has_a_value_and_a_failure_a_reason() -> None:
    assert Status.ok(3).get() == Status(3).get() == 3
    assert Status.ok().is_ok()
    failed: Status[Any] = Status.error(StatusCodes.DENIED, "why")
    assert (failed.is_denied(), failed.is_ok(), failed.get(), failed.get(7), failed.value) == (
        True,
        False,
        None,
        7,
        "why",
    )
    with pytest.raises(ValueError, match="no value"):
        Status.ok().get()
    with pytest.raises(ValueError, match="give one"):
        Status(3, 4)


@pytest.mark.parametrize("code", list(StatusCodes))
def test_each_code_has_a_question(code: StatusCodes) -> None:
    status: Status[Any] = Status(code)
    asked = {other: getattr(status, f"is_{other.name.lower()}")() for other in StatusCodes}
    assert [other for other, answer in asked.items() if answer] == [code]
    assert code.name in repr(status)


def test_a_status_of_a_status_is_the_same() -> None:
    status: Status[Any] = Status(StatusCodes.ERROR, OSError("disk"))
    copy: Status[Any] = Status(status)
    assert (copy.error_code, copy.value, copy.trace) == (status.error_code, status.value, status.trace)
    assert "disk" in repr(copy)
    assert copy == status
    assert copy != "text"


def test_a_failure_raises_what_it_carries() -> None:
    with pytest.raises(OSError, match="disk"):
        Status(StatusCodes.ERROR, OSError("disk")).raise_if_not_ok()
    with pytest.raises(RuntimeError, match="TIMEOUT"):
        Status(StatusCodes.TIMEOUT).raise_if_not_ok()
    Status.ok(1).raise_if_not_ok()


def test_exceptions_become_statuses_of_functions_and_coroutines() -> None:
    @Status.capture_exception
    def fails(error: Exception) -> None:
        raise error

    @Status.capture_exception
    async def fails_later(error: Exception) -> None:
        raise error

    for status in (fails(KeyError("k")), asyncio.run(fails_later(KeyError("k")))):
        assert status.is_error()
        assert isinstance(status.value, KeyError)
        assert "KeyError" in status.trace
    with pytest.raises(AssertionError):
        fails(AssertionError())
