"""What the backends of one process on one directory have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore_lmdb.gate import Gate
from kvstore_lmdb.shared_stores import SharedStores

from kvstore_nvme.store import Store
from kvstore_nvme.writer import Writer


@dataclass(frozen=True, slots=True)
class Shared:
    """An open store with its one writer.

    Attributes:
        store: The store.
        writer: Appends to it; None in a store that is open for reading only.
    """

    store: Store
    writer: Writer | None

    @classmethod
    def of(cls, store: Store) -> Shared:
        """Give a store its writer."""
        return cls(store, None if store.locks is None else Writer(store, store.locks))

    @property
    def gate(self) -> Gate:
        """What running operations have entered."""
        return self.store.gate

    def close(self) -> None:
        """Wait for running operations and close the store; may block."""
        self.store.close()

    def void(self) -> None:
        """Give up what a forked child inherited."""
        self.store.void()


STORES: Final[SharedStores[Shared]] = SharedStores("nvme")
"""Of this process, because what they guard (POSIX locks) belongs to the process."""
