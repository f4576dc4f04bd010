"""Where a setting stands, and the errors that point there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvstore.errors import ConfigError, PluginError, UnknownKeyError
from kvstore.plugins.naming import did_you_mean

HIDDEN: Final = "***"

_SECRET_LIKE: Final = re.compile(r"secret|passw|token|credential|key", re.IGNORECASE)
_SHOWN: Final = 80  # characters of a value in a message; enough for any path worth reading

_SHORT_CHARS: Final = 6  # a shorter secret, such as "a" of a test server, is hidden where it stands alone only


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Hide the values of secret options in a text that somebody else wrote."""
    for secret in secrets:
        anywhere = re.escape(secret)
        text = re.sub(anywhere if len(secret) >= _SHORT_CHARS else rf"(?<!\w){anywhere}(?!\w)", HIDDEN, text)
    return text


@dataclass(frozen=True, slots=True)
class Place:
    """A key path within a source.

    Attributes:
        source: The file, or ``"mapping"``.
        path: Key path such as ``l2[1].capacity``; empty for the whole source.
    """

    source: str
    path: str = ""

    def key(self, name: object) -> Place:
        """Return the place of a key of this section."""
        return replace(self, path=f"{self.path}.{name}" if self.path else str(name))

    def item(self, index: int) -> Place:
        """Return the place of an element of this array, counted from 0."""
        return replace(self, path=f"{self.path}[{index}]")

    def wrong(self, value: object, expected: str, problem: str = "", *, secret: bool = False) -> ConfigError:
        """Make the error for a value that cannot be used.

        Args:
            value: As given.
            expected: What would be right.
            problem: What is wrong with the value, when that is not plain from ``expected``.
            secret: Hide the value.
        """
        because = f" ({problem})" if problem else ""
        where = f"{self.source}: {self.path}" if self.path else self.source
        return ConfigError(f"{where} = {_show(value, secret=secret)}{because}: expected {expected}")

    def missing(self, expected: str) -> ConfigError:
        """Make the error for a key that must be there."""
        return ConfigError(f"{self.source}: {self.path} is missing: expected {expected}")

    def unknown(self, value: object, known: Iterable[str], *, hint: str = "", secret: bool = False) -> UnknownKeyError:
        """Make the error for a key that the schema does not have.

        Args:
            value: As given.
            known: Keys of the section.
            hint: What to do, when the nearest key is not the answer.
            secret: Hide the value.
        """
        name = self.path.rpartition(".")[2]
        names = sorted(known)
        shown = _show(value, secret=secret or _SECRET_LIKE.search(name) is not None)
        return UnknownKeyError(
            f"{self.source}: {self.path} = {shown}: unknown key {name!r}{hint or did_you_mean(name, names)}; "
            f"expected one of: {', '.join(names)}"
        )

    def plugin(self, value: object, error: PluginError) -> PluginError:
        """Make ``error`` say which setting asked for the plugin."""
        return type(error)(f"{self.source}: {self.path} = {_show(value, secret=False)}: {error}")


def _show(value: object, *, secret: bool) -> str:
    if secret:
        return HIDDEN
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except (RecursionError, ValueError):  # nested without end, or more digits than Python writes
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
