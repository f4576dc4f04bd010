"""The backend that the plugin makes: it becomes segments or tree when it learns its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore.backend import Backend, BackendContext, BatchShape, Capability, Place, PutItem, Receive, RecordInfo, Usage
from kvstore.errors import ClosedError, ConfigError
from kvstore.types import Call, Presence, PutStatus, ReadStatus
from kvstore_nvme.backend import NvmeBackend
from kvstore_nvme.options import NvmeOptions


class ChosenLayout(Backend):
    """Passes every call on to the backend that ``layout`` names; see there for what holds."""

    def __init__(self) -> None:
        self._chosen: Backend | None = None

    @property
    def capabilities(self) -> Capability:  # type: ignore[override]  # which ones depends on the layout
        """Those of the chosen layout; before ``open`` those of segments."""
        return NvmeBackend.capabilities if self._chosen is None else self._chosen.capabilities

    def open(self, context: BackendContext) -> None:
        """Choose and open.

        Raises:
            ConfigError: An option is wrong.
            BackendError: See the layout.
        """
        if not isinstance(context.options, NvmeOptions):
            raise ConfigError(f"tier {context.tier!r}: options must be NvmeOptions, not {context.options!r}")
        chosen: Backend = NvmeBackend()
        if context.options.layout == "tree":
            from kvstore_nvme.tree import TreeBackend

            chosen = TreeBackend()
        if self._chosen is not None:
            self._chosen.open(context)  # open already, or inherited over a fork: it knows what to do
            return
        chosen.open(context)
        self._chosen = chosen

    def close(self) -> None:
        """Close the chosen layout; calling it again does nothing."""
        if self._chosen is not None:
            self._chosen.close()

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """See the layout."""
        return self._opened.get_many(names, receive, call)

    def read_many(
        self, names: Sequence[bytes], place: Place, done: Callable[[int], None], call: Call
    ) -> list[ReadStatus]:
        """See the layout."""
        return self._opened.read_many(names, place, done, call)

    def get_ranges(
        self, names: Sequence[bytes], ranges: Sequence[tuple[int, int]], receive: Receive, call: Call
    ) -> list[ReadStatus]:
        """See the layout."""
        return self._opened.get_ranges(names, ranges, receive, call)

    def put_many(self, items: Sequence[PutItem], call: Call) -> list[PutStatus]:
        """See the layout."""
        return self._opened.put_many(items, call)

    def exists_many(self, names: Sequence[bytes], call: Call) -> list[Presence]:
        """See the layout."""
        return self._opened.exists_many(names, call)

    def delete_many(self, names: Sequence[bytes], call: Call) -> int:
        """See the layout."""
        return self._opened.delete_many(names, call)

    def discard(self, name: bytes, header_checksum: int) -> None:
        """See the layout."""
        self._opened.discard(name, header_checksum)

    def epoch(self, namespace: bytes, *, bump: bool = False) -> bytes:
        """See the layout."""
        return self._opened.epoch(namespace, bump=bump)

    def touch_many(self, names: Sequence[bytes]) -> None:
        """See the layout."""
        self._opened.touch_many(names)

    def drop(self, name_prefix: bytes) -> None:
        """See the layout."""
        self._opened.drop(name_prefix)

    def namespaces(self) -> list[bytes]:
        """See the layout."""
        return self._opened.namespaces()

    def scan(self) -> Iterator[RecordInfo]:
        """See the layout."""
        return self._opened.scan()

    def usage(self) -> Usage:
        """See the layout."""
        return self._opened.usage()

    def batch_shape(self) -> BatchShape:
        """See the layout."""
        return self._opened.batch_shape()

    def maintain(self) -> None:
        """See the layout."""
        self._opened.maintain()

    def describe(self) -> dict[str, str]:
        """See the layout."""
        return self._opened.describe()

    @property
    def _opened(self) -> Backend:
        if self._chosen is None:
            raise ClosedError("the NVMe backend is not open")
        return self._chosen
