"""Deleting on purpose: by name, or because a record failed verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.errors import BackendTimeoutError
from kvstore.objects.cuts import ends_for
from kvstore.objects.finder import Finder
from kvstore.objects.naming import key_of
from kvstore.objects.pack import Entry, PackError
from kvstore.objects.plan import Positions
from kvstore.objects.store import ObjectStore
from kvstore.types import Call

_CHECKSUM_AT: Final = 184  # of a record, see the record format
_CHECKSUM_END: Final = 192


class Remover:
    """Removes whole objects: the neighbours of a deleted record become misses with it."""

    def __init__(self, store: ObjectStore, finder: Finder) -> None:
        self._store = store
        self._finder = finder

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """Remove every object that may hold one of the names; returns how many names were stored.

        Raises:
            BackendError: Something could not be asked for or removed, and nothing was deleted.
        """
        wanted = list(dict.fromkeys(names))
        if call.stop():
            return 0
        looked = self._finder.locate(wanted, call)
        doomed = dict.fromkeys(there.end for there in looked.found.values())
        doomed.update(dict.fromkeys(wanted))  # a record of that name alone, or the end of a pack
        doomed.update(dict.fromkeys(self._other_copies(wanted, doomed, call)))
        deleted = sum(name in looked.found for name in wanted)
        if call.stop():
            return 0
        self._store.remove(list(doomed), call, told=wanted)
        self._store.remembered.forget(wanted)
        if looked.error is not None and not deleted and not isinstance(looked.error, BackendTimeoutError):
            raise looked.error
        return deleted

    def _other_copies(self, names: Sequence[bytes], known: dict[bytes, None], call: Call) -> list[bytes]:
        """Packs that hold a name too: an older, shorter cut of the same sequence, or a longer one."""
        positions = Positions(call.run, self._store.pack_blocks)
        asked: dict[bytes, list[int]] = {}
        for name in names:
            position = positions.of(name)
            for end in ends_for(position, positions.pack_blocks) if position is not None else ():
                if positions.start <= end < positions.stop and positions.name(end) not in known:
                    asked.setdefault(positions.name(end), []).append(position or 0)
        found = self._finder.look(list(asked), call).found
        return [
            end
            for end, there in found.items()
            if (last := positions.of(end)) is not None and max(asked[end]) > last - there.blocks
        ]

    def discard(self, name: bytes, header_checksum: int) -> None:
        """Remove the object that holds the record, if the record still has that checksum."""
        if self._store.context.read_only:
            return
        known = self._store.remembered.where(name)
        call = self._store.call()
        for end in dict.fromkeys([known.end, name] if known is not None else [name]):
            if self._condemned(end, name, header_checksum, call):
                self._store.remove([end], call, told=[name])
                return
            self._store.remembered.lost(end)  # what was known of it led to bad bytes

    def _condemned(self, end: bytes, name: bytes, header_checksum: int, call: Call) -> bool:
        key = key_of(end)
        try:
            entries = self._store.index_of(key, call)
        except PackError:
            self._store.condemn(end)
            return False
        entry = _entry(entries or [], name, last=end == name)
        if entry is None:
            return False
        if entry.nbytes < _CHECKSUM_END:
            return True
        start = entry.offset + _CHECKSUM_AT
        body = self._store.medium.read(key, call, start=start, stop=start + 8)
        if body is None:
            return False
        with body:
            checksum = bytearray(8)
            body.read_into(memoryview(checksum))
        return int.from_bytes(checksum, "little") == header_checksum


def _entry(entries: Sequence[Entry], name: bytes, *, last: bool) -> Entry | None:
    """The entry of a name; the last one stands for the object's name even when it has another."""
    found = next((entry for entry in entries if entry.name == name), None)
    return entries[-1] if found is None and last and entries else found
