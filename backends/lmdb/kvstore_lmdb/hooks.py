"""Registration of the LMDB backend; imports neither lmdb nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.hookspecs import hookimpl
from kvstore.plugins import BackendPlugin
from kvstore_lmdb.options import DEFAULT_CAPACITY_BYTES, LmdbOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.backend import Backend, BackendContext, Finding


def _make() -> Backend:
    from kvstore_lmdb.backend import LmdbBackend

    return LmdbBackend()


def _diagnose(context: BackendContext) -> Sequence[Finding]:
    from kvstore_lmdb.diagnose import diagnose

    return diagnose(context)


@hookimpl
def kvstore_register_backends() -> Iterable[BackendPlugin]:
    """Offer ``backend = "lmdb"``."""
    return [
        BackendPlugin(
            name="lmdb",
            options=LmdbOptions,
            factory=_make,
            summary="Memory-mapped file on a local disk, shared by processes; hot reads are one memcpy.",
            # reads are memory copies: compression pays for room, not for speed
            default_codec="planes",
            raw_below=0.5,
            default_capacity_bytes=DEFAULT_CAPACITY_BYTES,
            max_writers=1,
            diagnose=_diagnose,
        )
    ]
