"""Names of plugins and settings: their form, and the nearest known one to a misspelt one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def is_plugin_name(name: object) -> bool:
    """Say whether ``name`` is a string of lower-case words, digits allowed, joined by hyphens."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` is most likely a misspelling of, if any."""
    import difflib  # only error paths need it

    lowered = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'capacity'?"``, or ``""`` when nothing known is near."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"
