"""Options of the NVMe backend; importable without lmdb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvstore.errors import ConfigError
from kvstore.types import ByteSize, option

DEFAULT_CAPACITY_BYTES: Final = 64 << 30  # 64 GiB: four times the page-cache-sized default of the LMDB tier
MIN_CAPACITY_BYTES: Final = 4 << 20  # below this the index and the region in use leave no room for records
MAX_PACK_BLOCKS: Final = 256  # of one file of a tree

Layout = Literal["segments", "tree"]


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """Keys of an ``[[l2]]`` section with ``backend = "nvme"``, besides the core's own.

    Attributes:
        path: Directory of the store.
        layout: ``"segments"`` for a local disk, ``"tree"`` for a shared POSIX mount.
        direct: Bypass the page cache; None where the file system allows it.
        region_bytes: Space that is written in order and evicted as a whole; None chooses it.
        allow_network_fs: Open segment files on network file systems too.
        pack: Blocks of one file of a tree at most, a power of two; 1 for a file per block.
    """

    path: str = option(
        required=True,
        doc="Directory of the store; created with mode 0700 when absent. '~' is expanded.",
    )
    layout: Layout = option(
        "segments",
        doc="'segments': preallocated files on a local disk, the fastest. 'tree': one file per pack of blocks "
        "for shared mounts such as NFS, CephFS or Lustre.",
    )
    direct: bool | None = option(
        None,
        doc="Bypass the page cache (O_DIRECT). Default: where the file system allows it; true insists; false "
        "uses the page cache, for a working set that fits into memory. Segments only.",
    )
    region_bytes: ByteSize | None = option(
        None,
        doc="Space that is written in order and evicted as a whole; fixed when the store is made. Default: "
        "capacity / 64, between 4MiB and 256MiB, and a whole number of blocks. Segments only.",
    )
    allow_network_fs: bool = option(
        default=False,
        doc="Open segment files although the directory lies on a network file system, where locks and the shared "
        "index may not work. Segments only.",
    )
    pack: int = option(
        16,
        doc="Consecutive blocks in one file, a power of two up to 256; 1 for a file per block. Everybody who shares "
        "the directory must use the same. Tree only.",
    )

    def __post_init__(self) -> None:
        """Check what types alone cannot say.

        Raises:
            ConfigError: A value is out of range.
        """
        if not self.path or "\0" in self.path:
            raise ConfigError(f"backend 'nvme', option 'path': {self.path!r} is not a directory name")
        if not 1 <= self.pack <= MAX_PACK_BLOCKS or self.pack & (self.pack - 1):
            expected = f"a power of two from 1 (a file per block) to {MAX_PACK_BLOCKS}"
            raise ConfigError(f"backend 'nvme', option 'pack': got {self.pack}; expected {expected}")
