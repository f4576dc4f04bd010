"""Good copies of damaged records, from the other tiers of a config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvstore.backend import Capability
from kvstore.cli.archive import Parcel
from kvstore.cli.records import LivePrefixes, check
from kvstore.errors import BackendError, CorruptRecordError
from kvstore.types import Call

if TYPE_CHECKING:
    from kvstore.backend import Backend
    from kvstore.cli.store import Site, Store
    from kvstore.keyring import Keyring

_BATCH_S: Final = 60.0


class Donors:
    """The other tiers of a config, asked for good copies: the lower ones first, then the upper ones.

    Each is opened read-only at its first use; one that cannot be opened is passed over with a note.

    Args:
        sites: All tiers of the config that keep data at rest.
        site: The one to be repaired.
        keys: With which records must be authenticated; None to leave tags alone.
    """

    def __init__(self, sites: Sequence[Site], site: Site, keys: Keyring | None) -> None:
        at = next(i for i, other in enumerate(sites) if other.tier.name == site.tier.name)
        self._sites = [*sites[at + 1 :], *reversed(sites[:at])]
        self._keys = keys
        self._opened = ExitStack()
        self._stores: list[Store] | None = None

    def close(self) -> None:
        """Close them."""
        self._opened.close()

    def stores(self) -> list[Store]:
        """Those that could be opened."""
        if self._stores is None:
            self._stores = []
            for site in self._sites:
                try:
                    self._stores.append(self._opened.enter_context(site.opened()))
                except BackendError as e:
                    print(f"kvstore: tier {site.tier.name!r} cannot help to repair: {e}", file=sys.stderr)
        return self._stores

    def copies(self, wanted: dict[bytes, bytes]) -> dict[bytes, tuple[str, Parcel]]:
        """Find verified copies.

        Args:
            wanted: Kind and digest of each block (the last 33 bytes of its name) and its namespace.

        Returns:
            For those found, the tier they came from and the record.
        """
        found: dict[bytes, tuple[str, Parcel]] = {}
        for store in self.stores():
            missing = {block: namespace for block, namespace in wanted.items() if block not in found}
            if missing:
                try:
                    records = self._ask(store.backend, missing)
                except BackendError as e:
                    print(f"kvstore: tier {store.tier.name!r} cannot help to repair: {e}", file=sys.stderr)
                    continue
                found |= {block: (store.tier.name, record) for block, record in records.items()}
        return found

    def _ask(self, backend: Backend, wanted: dict[bytes, bytes]) -> dict[bytes, Parcel]:
        prefixes = LivePrefixes(backend)
        names = {
            prefix + block: namespace
            for block, namespace in wanted.items()
            if (prefix := prefixes.of(namespace)) is not None
        }
        if Capability.PACKS in backend.capabilities:
            return self._search(backend, names)
        return self._read(backend, list(names), names)

    def _search(self, backend: Backend, spaces: dict[bytes, bytes]) -> dict[bytes, Parcel]:
        """Look through the whole listing: blocks inside packs are found by whoever has just listed them."""
        from kvstore.cli.store import batches

        found: dict[bytes, Parcel] = {}
        for infos in batches(backend.scan()):
            found |= self._read(backend, [info.name for info in infos if info.name in spaces], spaces)
            if len(found) == len(spaces):
                break
        return found

    def _read(self, backend: Backend, names: Sequence[bytes], spaces: dict[bytes, bytes]) -> dict[bytes, Parcel]:
        found: dict[bytes, Parcel] = {}

        def receive(i: int, view: memoryview) -> None:
            try:
                head = check(view, names[i][17:], self._keys)
            except CorruptRecordError:
                return
            if head.namespace == spaces[names[i]]:
                found[names[i][16:]] = Parcel(names[i][16], head, bytes(view))

        if names:
            backend.get_many(names, receive, Call.within(_BATCH_S))
        return found
