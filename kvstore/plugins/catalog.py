"""Which distribution stands behind a plugin name, and whether it may be used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.errors import PluginConflictError, PluginError
from kvstore.plugins import messages
from kvstore.plugins.loader import OWN_DISTRIBUTION, Candidate, Candidates


class Catalog:
    """Plugin names, what claims them, and which are blocked.

    Not thread-safe: the registry calls it under its lock.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates: Final = dict(candidates)
        self._blocked: Final[set[str]] = set()

    def names(self) -> list[str]:
        """List every claimed name, sorted."""
        return sorted(self._candidates)

    def claims(self, name: str) -> tuple[Candidate, ...]:
        """Return what claims ``name``; empty when nothing does."""
        return self._candidates.get(name, ())

    def block(self, names: Iterable[str]) -> None:
        """Refuse ``names`` from now on; empty ones are ignored."""
        self._blocked.update(name.strip() for name in names if name.strip())

    def is_blocked(self, name: str) -> bool:
        """Whether ``name`` was blocked."""
        return name in self._blocked

    def refusal(self, name: str) -> PluginError | None:
        """Return why the claimed ``name`` may not be loaded: blocked or in conflict."""
        claims = self.claims(name)
        if claims and name in self._blocked:
            return messages.blocked(claims[0])
        return messages.conflict(claims) if len(claims) > 1 else None

    def own(self) -> list[Candidate]:
        """List the usable plugins that come with kvstore itself."""
        return [
            claims[0]
            for name, claims in self._candidates.items()
            if claims[0].distribution == OWN_DISTRIBUTION and self.refusal(name) is None
        ]

    def add(self, claims: Iterable[Candidate]) -> None:
        """Add names, all or none of them.

        Raises:
            PluginConflictError: One of them is taken.
        """
        added = {claim.name: claim for claim in claims}
        for name, claim in added.items():
            if name in self._candidates:
                error: PluginConflictError = messages.conflict([*self._candidates[name], claim])
                raise error
        self._candidates.update({name: (claim,) for name, claim in added.items()})
