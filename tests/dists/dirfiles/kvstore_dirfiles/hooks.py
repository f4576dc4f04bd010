"""What kvstore's entry point names; imported for every config that selects this backend."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.backend import Backend
from kvstore.hookspecs import hookimpl
from kvstore.plugins import BackendPlugin
from kvstore.types import option


@dataclass(frozen=True, slots=True)
class DirFilesOptions:
    """The config keys of this backend."""

    path: str = option(required=True, doc="Directory of the records; created when missing.")

    def __post_init__(self) -> None:
        if not self.path:
            msg = "path is empty: expected a directory"
            raise ValueError(msg)


def _backend() -> Backend:
    from .backend import DirFilesBackend  # here, so that listing plugins imports no driver

    return DirFilesBackend()


@hookimpl
def kvstore_register_backends() -> list[BackendPlugin]:
    """Announce the backend."""
    return [
        BackendPlugin(
            name="dirfiles",
            options=DirFilesOptions,
            factory=_backend,
            summary="One file per record",
            default_codec="none",
            max_writers=4,
        )
    ]
