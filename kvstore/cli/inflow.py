"""Records into a store: verified again, named with the store's own epochs, heads youngest."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstore.cli.archive import Document, Parcel, Piece, Refused
from kvstore.cli.lane import Arrivals, Lane
from kvstore.cli.namespaces import parse_document
from kvstore.cli.records import check
from kvstore.cli.store import KINDS, Subject
from kvstore.errors import CorruptRecordError

if TYPE_CHECKING:
    from kvstore.cli.output import Advance
    from kvstore.cli.store import Site
    from kvstore.keyring import Keyring
    from kvstore.record import Head


class Inflow:
    """Puts records into one tier, which is opened for one namespace at a time, as a cache would do it.

    Args:
        site: The tier.
        keys: With which records must be authenticated; None to leave tags alone.
    """

    def __init__(self, site: Site, keys: Keyring | None = None) -> None:
        self._site = site
        self._keys = keys
        self._documents: dict[bytes, str] = {}
        self._lane: Lane | None = None
        self._opened = ExitStack()
        self.arrivals = Arrivals()

    def take_all(self, pieces: Iterable[Piece], advance: Advance) -> None:
        """Take what comes until its end; what was taken before an error stays.

        Raises:
            ConfigError, BackendError: The tier cannot be opened, or its medium failed.
        """
        with self._opened:
            for piece in pieces:
                if isinstance(piece, Document):
                    self._describe(piece)
                elif isinstance(piece, Refused):
                    self.arrivals.refused.append(piece)
                else:
                    self._take(piece)
                    advance(1, len(piece.data))
            self._finish_lane()

    def _describe(self, document: Document) -> None:
        """Keep a description that proves itself; another one says what nobody can check."""
        parsed = parse_document(document.text)
        if parsed is None or parsed[0].digest(parsed[1]) != document.namespace:
            self.arrivals.documents["unverified"] += 1
            return
        namespace, spec = parsed
        self._documents[document.namespace] = namespace.to_json(spec)
        self.arrivals.documents["kept"] += 1

    def _take(self, parcel: Parcel) -> None:
        name = f"{parcel.head.namespace.hex()}/{parcel.kind:02x}/{parcel.head.digest.hex()}"
        if parcel.kind not in KINDS:
            self.arrivals.refused.append(Refused(name, f"has a key of an unknown kind, {parcel.kind}"))
            return
        try:
            head = check(memoryview(parcel.data), parcel.head.digest, self._keys)
        except CorruptRecordError as e:
            self.arrivals.refused.append(Refused(name, str(e)))
            return
        self._lane_of(head).add(parcel)

    def _lane_of(self, head: Head) -> Lane:
        if self._lane is None or self._lane.namespace != head.namespace:
            self._finish_lane()
            subject = Subject(head.namespace, self._documents.get(head.namespace), head.raw_bytes)
            store = self._opened.enter_context(self._site.opened(read_only=False, subject=subject))
            self._lane = Lane(store, head.namespace, self.arrivals)
        return self._lane

    def _finish_lane(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.finish()
            self._opened.close()
