"""Stored bytes behind a backend's back: how laws about damage reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.backend import Backend
from kvstore.testing.samples import call, named, put, read


class Raw(Protocol):
    """Reads and edits what lies on the medium under a stored name."""

    def get(self, name: bytes) -> bytes | None:
        """Return the record's bytes, None when there is none."""

    def put(self, name: bytes, data: bytes) -> None:
        """Make ``data`` the record, whatever it is."""


class RawThroughBackend:
    """Exchanges records with the backend's own calls; works on every medium.

    A medium that can be edited from outside (files, objects, a dict) gives a truer test when the suite's
    ``raw`` fixture returns an accessor of its own.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def get(self, name: bytes) -> bytes | None:
        """Read one record."""
        return read(self._backend, [name])[0]

    def put(self, name: bytes, data: bytes) -> None:
        """Delete the record and store another one under its name."""
        self._backend.delete_many([name], call())
        put(self._backend, named(name, data))


MakeRaw = Callable[[Backend], Raw]
"""Makes the accessor for an opened backend."""
