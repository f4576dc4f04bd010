"""Caches that are open in this process: closed at its exit, told when it was forked."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, Final, Protocol


class Closable(Protocol):
    """What can be watched."""

    def close(self) -> None:
        """Write out what fits into the time, and release everything."""


_watched: Final[dict[Closable, Callable[[Any], None]]] = {}
"""Kept alive until closed: what a cache that somebody dropped has queued shall still be written at exit."""


def watch(cache: Closable, forked: Callable[[Any], None]) -> None:
    """Close ``cache`` at exit, and call ``forked(cache)`` first thing in a forked child."""
    _install()
    _watched[cache] = forked


def unwatch(cache: Closable) -> None:
    """Forget a cache that was closed."""
    _watched.pop(cache, None)


def _close_all() -> None:
    """At exit: write out what fits into the time, so that a script without close() loses little."""
    for cache in list(_watched):
        with contextlib.suppress(Exception):  # nothing may spoil the interpreter's exit
            cache.close()


def _after_fork_in_child() -> None:
    for cache, forked in list(_watched.items()):
        forked(cache)


@functools.cache
def _install() -> None:
    """Install the exit and fork hooks, once per process and only when a cache is opened."""
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_after_fork_in_child)
