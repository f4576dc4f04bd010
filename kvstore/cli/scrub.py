"""Reading all records of a store and telling the sound ones from the others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.cli.records import check
from kvstore.errors import CorruptRecordError
from kvstore.record import parse_head

if TYPE_CHECKING:
    from kvstore.backend import RecordInfo
    from kvstore.cli.output import Advance
    from kvstore.cli.store import Store
    from kvstore.keyring import Keyring
    from kvstore.record import Head
    from kvstore.types import ReadStatus

_CHECKSUM_AT = slice(184, 192)  # header checksum of a record, see the record format


@dataclass(frozen=True, slots=True)
class Suspect:
    """A record that failed.

    Attributes:
        name: Where it is stored.
        header_checksum: Tells it from a good copy that may have replaced it.
        namespace: Whose block it was to be; None when its head does not tell.
        error: What is wrong with it.
    """

    name: bytes
    header_checksum: int
    namespace: bytes | None
    error: CorruptRecordError

    @property
    def unauthenticated(self) -> bool:
        """Whether it is undamaged, but not made with a key that the config names."""
        return self.error.reason == "tag"

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return {"name": self.name.hex(), "reason": self.error.reason, "detail": str(self.error)}


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a store to read.

    Attributes:
        fraction: Chance of each record, above 0, at most 1.
        limit: Records at most; None for all.
    """

    fraction: float = 1.0
    limit: int | None = None

    def expected(self, records: int) -> int:
        """About how many records that are."""
        chosen = round(records * self.fraction)
        return chosen if self.limit is None else min(chosen, self.limit)

    def wanted(self) -> Callable[[RecordInfo], bool] | None:
        """A choice by lot, another one each time; None for all records."""
        draw = random.Random()  # noqa: S311 - to be spread, not to be secret
        return None if self.fraction >= 1 else lambda _: draw.random() < self.fraction


@dataclass(slots=True)
class Scrub:
    """One pass over a store.

    Args:
        store: Opened.
        keys: With which records must be authenticated; None to leave tags alone.
        bad: Told each record that failed, with its bytes, valid during the call.

    Attributes:
        sound: How many passed.
        nbytes: Bytes that were read.
        suspects: Those that failed, in the order of the listing.
        namespaces: Of the sound records.
    """

    store: Store
    keys: Keyring | None = None
    bad: Callable[[Suspect, memoryview], None] | None = None
    sound: int = 0
    nbytes: int = 0
    suspects: list[Suspect] = field(default_factory=list)
    namespaces: set[bytes] = field(default_factory=set)

    def run(self, extent: Extent, advance: Advance) -> Counter[ReadStatus]:
        """Read and check; returns how often each status came up.

        Raises:
            NotSupportedError: The backend cannot list its records.
            BackendError: The medium failed.
        """
        from kvstore.cli.store import read_all

        def visit(info: RecordInfo, view: memoryview) -> None:
            self._visit(info.name, view)
            advance(1, view.nbytes)

        return read_all(self.store.backend, visit, limit=extent.limit, wanted=extent.wanted())

    def _visit(self, name: bytes, view: memoryview) -> None:
        self.nbytes += view.nbytes
        try:
            head = self._check(name, view)
        except CorruptRecordError as e:
            suspect = Suspect(name, int.from_bytes(view[_CHECKSUM_AT], "little"), _namespace_of(view), e)
            self.suspects.append(suspect)
            if self.bad is not None:
                self.bad(suspect, view)
        else:
            self.sound += 1
            self.namespaces.add(head.namespace)

    def _check(self, name: bytes, view: memoryview) -> Head:
        try:
            return check(view, name[17:], self.keys)
        except CorruptRecordError as e:
            if e.reason == "tag":
                check(view, name[17:])  # damage is worse than a missing tag, and is looked for later
            raise

    def corrupt(self) -> list[Suspect]:
        """Those that are damaged."""
        return [suspect for suspect in self.suspects if not suspect.unauthenticated]

    def unauthenticated(self) -> list[Suspect]:
        """Those that are not, but were made without the keys."""
        return [suspect for suspect in self.suspects if suspect.unauthenticated]


def _namespace_of(view: memoryview) -> bytes | None:
    try:
        return parse_head(view).namespace
    except CorruptRecordError:
        return None


def around(listed: Sequence[bytes], names: Collection[bytes], reach: int) -> list[bytes]:
    """Names that stand within ``reach`` places of some others in a listing, in its order, those left out."""
    places = [i for i, name in enumerate(listed) if name in names]
    near = sorted({i for place in places for i in range(max(0, place - reach), place + reach + 1)})
    return [listed[i] for i in near if i < len(listed) and listed[i] not in names]
