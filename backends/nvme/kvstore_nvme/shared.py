"""What the backends of one process on one directory have in common."""

from __future__ import annotations

from dataclasses import dataclass

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
