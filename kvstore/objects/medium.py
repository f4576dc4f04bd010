"""The contract with a medium that keeps whole objects: six verbs, text keys, bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Final, Self

from kvstore.types import Call

_SKIP_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a medium says about an object without reading it.

    Attributes:
        key: Its key.
        nbytes: Its length.
        modified: Unix time in seconds of its creation or last refresh.
        blocks: Records inside, as given to :meth:`ObjectMedium.write`; 0 when the medium does not say.
    """

    key: str
    nbytes: int
    modified: float
    blocks: int = 0


class ObjectBody(ABC):
    """The bytes of one object, or of a range of it, read once from front to back by one thread.

    Attributes:
        nbytes: Length of this body.
        modified: Unix time of the object's creation or refresh; 0.0 when the medium does not say.
        gather_bytes: Records of about so many bytes together are read with one
            :meth:`read_into_all`; 0 where that saves nothing, so that each is delivered once it is there.
    """

    nbytes: int
    modified: float = 0.0
    gather_bytes: ClassVar[int] = 0

    @abstractmethod
    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes.

        Raises:
            BackendTimeoutError: The call's deadline passed.
            BackendUnavailableError: The body ended early or the medium failed.
        """

    def read_into_all(self, views: Sequence[memoryview]) -> None:
        """Fill views one after the other; a medium that reads several at once overrides it."""
        for view in views:
            self.read_into(view)

    def skip(self, nbytes: int) -> None:
        """Pass over the next bytes; a medium that can seek overrides it."""
        scratch = memoryview(bytearray(min(nbytes, _SKIP_BYTES)))
        while nbytes:
            part = scratch[: min(nbytes, _SKIP_BYTES)]
            self.read_into(part)
            nbytes -= part.nbytes

    @abstractmethod
    def close(self) -> None:
        """Give the connection or file back, wherever reading has got to; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ObjectMedium(ABC):
    """A place for whole objects; each is written atomically.  Thread-safe.

    Keys match ``[A-Za-z0-9/_.=-]{1,512}``.  A method ends about when its call's deadline passes.
    Whatever goes wrong is raised as :class:`~kvstore.errors.BackendError` of the fitting class:
    ``BackendTimeoutError``, ``BackendUnavailableError``, ``BackendPermissionError`` (refused),
    ``NotSupportedError`` (a write to a place that is read-only), ``BackendFullError``.  An absent
    object is an answer, never an error.
    """

    @abstractmethod
    def read(self, key: str, call: Call, *, start: int = 0, stop: int | None = None) -> ObjectBody | None:
        """Open the bytes ``[start, stop)`` of an object, cut at its end; None when it is absent."""

    @abstractmethod
    def write(self, key: str, buffers: Sequence[memoryview | bytes], call: Call, *, once: bool, blocks: int) -> bool:
        """Publish an object made of ``buffers``.

        Args:
            key: Where.
            buffers: Gather list, unchanged until the method returns.
            call: Limits.
            once: Leave an object that is there already as it is, where the medium can tell.
            blocks: Remembered for :attr:`ObjectInfo.blocks`.

        Returns:
            False when ``once`` found the key taken.
        """

    @abstractmethod
    def head(self, key: str, call: Call) -> ObjectInfo | None:
        """Look at an object without reading it; None when it is absent."""

    @abstractmethod
    def remove(self, keys: Sequence[str], call: Call) -> None:
        """Remove objects; absent ones are no error."""

    @abstractmethod
    def refresh(self, key: str, call: Call) -> None:
        """Make an object as young as a new one; nothing happens when it is absent."""

    @abstractmethod
    def entries(self, prefix: str, call: Call) -> Iterator[ObjectInfo]:
        """List the objects whose keys start with ``prefix``, in any order."""

    def backdate(self, key: str, by_s: float, call: Call) -> None:
        """Make a new object count as that much older, where the medium keeps ages that can be set.

        The engine asks for it so that, of one sequence, the tail is evicted before the head.
        """

    def overhead_bytes(self) -> int:
        """Bytes taken besides the objects' own: directories, leftovers; 0 where nothing is."""
        return 0

    def maintain(self) -> None:
        """Do small upkeep; called about once a second."""

    def describe(self) -> dict[str, str]:
        """Facts for ``stat`` and ``doctor``; no secrets."""
        return {}

    def close(self) -> None:
        """Release connections and files; idempotent."""
