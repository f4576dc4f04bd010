"""The broken backends as plugins; the hooks module that processes of the suite are told."""

from __future__ import annotations

import re

from kvstore.backend import Backend
from kvstore.hookspecs import hookimpl
from kvstore.memory_backend import MemoryOptions
from kvstore.plugins import BackendPlugin
from tests.conformance import broken_memory
from tests.conformance.broken_shared import OnLmdb
from tests.conformance.catches import CATCHES

__all__ = ["CATCHES", "broken_memory", "needs_a_disk", "plugin_name"]


def needs_a_disk(broken: type[Backend]) -> bool:
    """Whether a backend lies on a shared medium."""
    return issubclass(broken, OnLmdb)


def plugin_name(broken: type[Backend]) -> str:
    """``StaleExists`` to ``stale-exists``."""
    return re.sub(r"(?<!^)([A-Z])", r"-\1", broken.__name__).lower()


@hookimpl
def kvstore_register_backends() -> list[BackendPlugin]:
    """Every broken backend under a name of its own, also for other processes."""
    from kvstore_lmdb.options import LmdbOptions

    return [
        BackendPlugin(
            name=plugin_name(broken),
            options=LmdbOptions if needs_a_disk(broken) else MemoryOptions,
            factory=broken,
            summary=(broken.__doc__ or "").splitlines()[0],
            default_codec="none",
        )
        for broken in CATCHES
    ]
