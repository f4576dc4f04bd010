"""Options of the LMDB backend; importable without lmdb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.types import ByteSize, option

DEFAULT_CAPACITY_BYTES: Final = 16 << 30  # 16 GiB: a page-cache-sized working set on a server
MIN_CAPACITY_BYTES: Final = 256 << 10  # below this the tree pages outweigh the records
SMALLEST_MAP_BYTES: Final = 64 << 30  # 64 GiB of address space; costs no disk and leaves room to raise the capacity


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """Keys of an ``[[l2]]`` section with ``backend = "lmdb"``, besides the core's own.

    Attributes:
        path: Directory of the database.
        map_size: Address space of the memory map in bytes; None chooses it from the capacity.
        max_readers: Concurrent read transactions over all processes.
        allow_network_fs: Open on network file systems too.
    """

    path: str = option(
        required=True,
        doc="Directory of the database on a local disk; created with mode 0700 when absent. '~' is expanded.",
    )
    map_size: ByteSize | None = option(
        None,
        doc="Address space reserved for the memory map, fixed while the store is open; takes no disk. "
        "Default: twice the capacity, at least 64GiB.",
    )
    max_readers: int = option(1024, doc="Concurrent read transactions over all processes, 1024 to 65536.")
    allow_network_fs: bool = option(
        default=False,
        doc="Open although the directory lies on NFS, CIFS, FUSE or another network file system, "
        "where a shared memory map may tear records or kill the process.",
    )


def map_bytes(options: LmdbOptions, capacity_bytes: int) -> int:
    """Return the size of the memory map for a capacity, in bytes."""
    return options.map_size or max(2 * capacity_bytes, SMALLEST_MAP_BYTES)
