"""Steps that may hang, because a medium does: run with a limit, never waited for beyond it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import BackendTimeoutError

T = TypeVar("T")


def bounded(what: str, limit_s: float, step: Callable[[], T]) -> T:
    """Run ``step`` in a daemon thread and return what it returns; its exceptions propagate.

    A step that hangs keeps its thread, which ends with the process.

    Args:
        what: Names the step in the error.
        limit_s: Seconds to wait.
        step: What to do.

    Raises:
        BackendTimeoutError: The step has not ended in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(step())
        except BaseException as e:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(e)

    thread = threading.Thread(target=run, name=f"kvstore-{what}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        msg = f"{what}: no answer within {limit_s:g} s"
        raise BackendTimeoutError(msg)
    return results[0]
