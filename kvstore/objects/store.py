"""What the parts of the engine share: the medium, what is known of it, and the rules for both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.backend import BackendContext
from kvstore.errors import BackendError
from kvstore.objects.ages import Ages
from kvstore.objects.fanout import Fanout
from kvstore.objects.medium import ObjectBody, ObjectInfo, ObjectMedium
from kvstore.objects.naming import key_of
from kvstore.objects.pack import (
    HEADER,
    Entry,
    PackError,
    index_room,
    parse_header,
    read_entries,
    read_header,
    read_index,
)
from kvstore.objects.remembered import Remembered, StoredObject
from kvstore.objects.settings import ObjectSettings
from kvstore.objects.space import Space
from kvstore.types import Call

_INDEX_READ_BYTES: Final = 4096  # header and index of a pack of 55 blocks: one small read for usual ones


class ObjectStore:
    """One open medium with its settings, threads and memory; thread-safe."""

    def __init__(self, medium: ObjectMedium, settings: ObjectSettings, context: BackendContext) -> None:
        self.medium = medium
        self.settings = settings
        self.context = context
        self.pack_blocks = settings.pack_blocks_for(context.block_bytes)
        self.fanout = Fanout(f"kvstore-{context.tier}-objects", settings.threads)
        self.remembered = Remembered(settings.remembered_names, settings.positive_ttl_s, settings.negative_ttl_s)
        self.ages = Ages(self)
        self.space = Space(self)

    def call(self) -> Call:
        """Limits for one operation that no caller waits for."""
        return Call.within(self.settings.request_s)

    def close(self) -> None:
        """Stop the threads, then let go of the medium."""
        self.fanout.close()
        self.medium.close()

    def look(self, end: bytes, call: Call) -> StoredObject | None:
        """Look at the object stored under a name without reading records; None when there is no sound one."""
        key = key_of(end)
        info = self.medium.head(key, call)
        if info is None:
            return None
        blocks = info.blocks or self._count(key, info, call)
        return StoredObject(end, blocks, info.nbytes, info.modified) if blocks else None

    def _count(self, key: str, info: ObjectInfo, call: Call) -> int:
        """Ask the object itself how many records it holds; 0 when it is no pack."""
        body = self.medium.read(key, call, start=0, stop=HEADER.size)
        if body is None:
            return 0
        with body:
            start = bytearray(body.nbytes)
            body.read_into(memoryview(start))
        with contextlib.suppress(PackError):
            return parse_header(start, info.nbytes).records
        return 0

    def index_of(self, key: str, call: Call) -> list[Entry] | None:
        """Read the index of an object and nothing else; None when the object is absent.

        Raises:
            PackError: It is no sound pack.
        """
        return self.index(key, None, call)

    def index(self, key: str, nbytes: int | None, call: Call) -> list[Entry] | None:
        """Like :meth:`index_of` for an object of a length that is known, which is checked.

        Raises:
            PackError: It is no sound pack.
        """
        stop = max(_INDEX_READ_BYTES, index_room(self.settings.pack_blocks))
        body = self.medium.read(key, call, stop=stop)
        if body is None:
            return None
        with body:
            header = read_header(body, nbytes)
            if header.records_at <= body.nbytes:
                return read_entries(body, header)
        if body.nbytes < stop:
            msg = f"{body.nbytes} bytes, the index alone ends at {header.records_at}"
            raise PackError(msg)
        body = self.medium.read(key, call, stop=header.records_at)  # a larger pack than ours are
        if body is None:
            return None
        with body:
            return read_index(body, nbytes)

    def open_pack(self, key: str, call: Call) -> tuple[ObjectBody, list[Entry]] | None:
        """Open an object whole and read its index; the caller closes the body."""
        body = self.medium.read(key, call)
        if body is None:
            return None
        try:
            return body, read_index(body, body.nbytes)
        except BaseException:
            body.close()
            raise

    def remove(self, ends: Sequence[bytes], call: Call, *, told: Iterable[bytes] = ()) -> None:
        """Remove objects and forget what they held; neighbours of the ``told`` names are reported as removed."""
        if not ends:
            return
        self.medium.remove([key_of(end) for end in ends], call)
        lost: list[bytes] = []
        for end in ends:
            lost.extend(self.lost(end))
        self.remembered.note_holes(lost)
        neighbours = set(lost).difference(told)
        if neighbours:
            self.context.removed(list(neighbours))

    def lost(self, end: bytes) -> list[bytes]:
        """The object of that name is gone; forget and uncount it, return the names remembered to be in it."""
        there = self.remembered.where(end)
        names = self.remembered.lost(end)
        if there is not None and there.end == end and names:
            self.space.lost(there)
        return names

    def condemn(self, end: bytes) -> None:
        """Remove an object that is no sound pack, after a second look: somebody may have repaired it."""
        self.remembered.note_holes(self.remembered.lost(end))
        if self.context.read_only:
            return
        call = self.call()
        with contextlib.suppress(BackendError):  # it stays a miss; the next reader tries again
            if not self._sound(end, call):
                self.medium.remove([key_of(end)], call)

    def _sound(self, end: bytes, call: Call) -> bool:
        try:
            key = key_of(end)
            info = self.medium.head(key, call)
            if info is not None:
                self.index(key, info.nbytes, call)
        except PackError:
            return False
        return True  # sound, or gone already

    def stale(self, modified: float) -> bool:
        """Whether an object of that age should be made young again when it is used."""
        after = self.settings.refresh_after_s
        return after is not None and time.time() - modified >= after
