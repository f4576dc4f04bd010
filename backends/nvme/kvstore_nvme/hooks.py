"""Registration of the NVMe backend; imports neither lmdb nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.hookspecs import hookimpl
from kvstore.plugins import BackendPlugin
from kvstore_nvme.options import DEFAULT_CAPACITY_BYTES, NvmeOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.backend import Backend, BackendContext, Finding


def _make() -> Backend:
    from kvstore_nvme.choice import ChosenLayout

    return ChosenLayout()


def _diagnose(context: BackendContext) -> Sequence[Finding]:
    from kvstore_nvme.diagnosis import diagnose

    return diagnose(context)


@hookimpl
def kvstore_register_backends() -> Iterable[BackendPlugin]:
    """Offer ``backend = "nvme"``."""
    return [
        BackendPlugin(
            name="nvme",
            options=NvmeOptions,
            factory=_make,
            summary="Segment files with direct I/O on a local disk, or a file tree on a shared mount.",
            # a raw record is read straight into its place: compression pays for room and wear, not for speed
            default_codec="planes",
            raw_below=0.5,
            default_admit="hot",
            default_capacity_bytes=DEFAULT_CAPACITY_BYTES,
            max_writers=4,  # 2 to 4 threads reach the device's speed from 512 KiB on
            diagnose=_diagnose,
        )
    ]
