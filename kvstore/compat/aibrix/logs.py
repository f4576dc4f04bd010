"""The logging functions that AIBrix's users import."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final

_last_s: Final[dict[tuple[str, int, str], float]] = {}
_lock: Final = threading.Lock()


def log_if(logger: logging.Logger, level: int, msg: object, condition: object, *args: Any) -> None:
    """Log if the condition holds."""
    if condition:
        logger.log(level, msg, *args)


def log_every_n_seconds(logger: logging.Logger, level: int, msg: object, n_seconds: float, *args: Any) -> None:
    """Log at most once in ``n_seconds`` from one line of the caller's code; None is nothing to say."""
    if msg is None:
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    now_s = time.monotonic()
    with _lock:
        due = now_s - _last_s.get((file, line, function), float("-inf")) >= n_seconds
        if due:
            _last_s[file, line, function] = now_s
    log_if(logger, level, msg, due, *args)
