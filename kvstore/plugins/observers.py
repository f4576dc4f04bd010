"""Calls into observer plugins: what they raise stops here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

_log: Final = logging.getLogger(__name__)


class Observer:
    """One hook implementation behind a border: calling it never raises.

    Several threads may call it at once, as far as the plugin's function allows that.

    Attributes:
        plugin: Which plugin and hook this is.
        failures: Calls that raised so far.
    """

    def __init__(self, plugin: str, function: Callable[..., object], *, takes_argument: bool) -> None:
        self.plugin: Final = plugin
        self.failures = 0
        self._function: Final = function
        self._takes_argument: Final = takes_argument

    def __call__(self, fact: Any) -> None:
        """Hand ``fact`` to the plugin; log the first exception, count all of them."""
        try:
            if self._takes_argument:
                self._function(fact)
            else:
                self._function()
        except Exception:  # noqa: BLE001 - border: an observer must not hurt the cache
            self.failures += 1
            if self.failures == 1:
                _log.exception("%s raised; later failures of this observer are only counted", self.plugin)
