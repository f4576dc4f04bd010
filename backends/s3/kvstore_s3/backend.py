"""The S3 backend: a bucket under the object engine."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from kvstore.backend import BackendContext, Capability
from kvstore.errors import ConfigError
from kvstore.objects.backend import ObjectBackend
from kvstore.objects.medium import ObjectMedium
from kvstore.objects.settings import ObjectSettings
from kvstore_s3.opening import open_bucket
from kvstore_s3.options import S3Options

_REFRESH_S: Final = 6 * 3600.0  # objects in use cost four copies a day, a thousandth of a cent


class S3Backend(ObjectBackend):
    """Blocks in a bucket, in packs, shared by any number of processes and machines."""

    capabilities: ClassVar[Capability] = ObjectBackend.capabilities | Capability.EVICTS

    def settings(self, context: BackendContext) -> ObjectSettings:
        """Tell the engine how to treat a bucket."""
        options = _options(context)
        return ObjectSettings(
            pack_blocks=options.pack,
            threads=options.connections,
            positive_ttl_s=options.positive_ttl,
            negative_ttl_s=options.negative_ttl,
            refresh_after_s=_refresh_after_s(options, context),
            evicts=True,  # within a capacity, and on a bucket that says it is full
        )

    def connect(self, context: BackendContext) -> ObjectMedium:
        """Open the bucket; everything that can be wrong with it is raised here."""
        return open_bucket(_options(context), tier=context.tier, read_only=context.read_only, logger=context.logger)


def _refresh_after_s(options: S3Options, context: BackendContext) -> float | None:
    """Age of a used object at which it is copied onto itself; None for never."""
    if options.refresh_after is not None:
        return options.refresh_after or None
    return None if context.capacity_bytes is None else _REFRESH_S


def _options(context: BackendContext) -> S3Options:
    options: Any = context.options
    if not isinstance(options, S3Options):
        raise ConfigError(f"backend 's3': got options of type {type(options).__name__}; expected S3Options")
    return options
