"""Error texts of the registry: what was asked, what is there, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.errors import PluginConflictError, PluginError, PluginNotFoundError
from kvstore.plugins.descriptors import Kind
from kvstore.plugins.loader import OWN_DISTRIBUTION, Candidate
from kvstore.plugins.naming import did_you_mean

COMES_WITH_KVSTORE: Final = frozenset(
    {"lmdb", "memory", "none", "zstd", "planes", "planes-base", "prefix-lru", "lru", "fifo", "s3fifo"}
)
"""Plugins of this distribution; one of them missing means that it was not installed properly."""


def not_found(name: str, kind: str, known: Iterable[str]) -> PluginNotFoundError:
    """Make the error for a name that nothing installed provides.

    Args:
        name: The requested name.
        kind: ``"backend"``, ``"codec"``, ``"policy"`` or ``"plugin"``.
        known: Names that would have been right.
    """
    names = sorted(known)
    if name in COMES_WITH_KVSTORE:
        repair = f"pip install --force-reinstall {OWN_DISTRIBUTION}"
        hint = f"it comes with kvstore, so the installation is incomplete: {repair}"
    else:
        hint = (
            f"install the distribution that provides it (entry point {name!r} in group 'kvstore'); "
            f"'kvstore plugins list' shows what is installed"
        )
    return PluginNotFoundError(
        f"unknown {kind} {name!r}{did_you_mean(name, names)}; installed: {', '.join(names) or 'nothing'}; {hint}"
    )


def wrong_kind(candidate: Candidate, kind: Kind, provides: Sequence[Kind], known: Iterable[str]) -> PluginNotFoundError:
    """Make the error for a plugin that exists, but is something else."""
    is_a = " and ".join(provides) or "plugin without descriptors"
    return PluginNotFoundError(
        f"{candidate.name!r} ({candidate.origin}) is a {is_a}, not a {kind}; "
        f"installed for {kind}: {', '.join(sorted(known)) or 'nothing'}"
    )


def conflict(candidates: Sequence[Candidate]) -> PluginConflictError:
    """Make the error for a name that several distributions claim."""
    claims = ", ".join(f"{c.origin} ({c.target})" for c in candidates)
    return PluginConflictError(
        f"plugin {candidates[0].name!r} is provided by more than one distribution: {claims}; uninstall all but one"
    )


def blocked(candidate: Candidate) -> PluginError:
    """Make the error for a plugin that the config blocks."""
    return PluginError(f"{candidate.describe()} is blocked; remove it from blocked_plugins to use it")


def provides_nothing(candidate: Candidate) -> str:
    """Say that a plugin's module loaded, but knows nothing of its name."""
    return (
        f"{candidate.describe()} is broken: {candidate.target} registers nothing named {candidate.name!r} "
        f"and observes nothing; entry point and descriptor must have the same name"
    )


def no_entry_point(candidate: Candidate, kind: Kind, name: str) -> str:
    """Say that a module registers a name that no entry point announces."""
    return (
        f"{candidate.describe()} is broken: it registers the {kind} {name!r} without an entry point of that name; "
        f"add '{name} = \"{candidate.target}\"' to [project.entry-points.kvstore] or correct the name"
    )


def same_codec_id(candidate: Candidate, name: str, codec_id: int, other: str) -> str:
    """Say that a codec's number in records is taken."""
    return (
        f"{candidate.describe()} is broken: codec {name!r} has the id {codec_id}, which is codec {other!r}; "
        f"stored records name codecs by id, so choose another one"
    )
