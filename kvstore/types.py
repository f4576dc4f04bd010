"""Small shared vocabulary: units for option schemas, statuses and call results.

Standard library only, so that plugin authors can import it for free.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final


@dataclass(frozen=True, slots=True)
class Unit:
    """Marks an option field's unit, so that the config loader parses ``"4GiB"`` or ``"500ms"``."""

    kind: str


ByteSize = Annotated[int, Unit("bytes")]
"""An option in bytes; config accepts an integer or a string with a unit such as ``"4GiB"``."""

Seconds = Annotated[float, Unit("seconds")]
"""An option in seconds; config accepts a number or a string with a unit such as ``"500ms"``."""


def option(default: Any = None, *, doc: str, factory: Any = None, required: bool = False, secret: bool = False) -> Any:
    """Declare one field of a plugin's options dataclass.

    Args:
        default: Value used when the config does not name the option.
        doc: One or two sentences for ``kvstore init``, ``config check`` and the docs table.
        factory: Zero-argument callable for mutable defaults; excludes ``default``.
        required: The config must name the option; it then has no default.
        secret: The value must never be shown: not in messages, ``repr`` or ``config check``.

    Returns:
        A :func:`dataclasses.field` carrying ``doc`` and ``secret`` in its metadata.
    """
    metadata = {"doc": doc, "secret": secret}
    if required:
        return field(metadata=metadata, repr=not secret)
    if factory is not None:
        return field(default_factory=factory, metadata=metadata, repr=not secret)
    return field(default=default, metadata=metadata, repr=not secret)


class Presence(enum.Enum):
    """Answer to "is this block there?"; advisory, only a read tells the truth."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    """The tier that might hold it could not be asked."""


class BlockStatus(enum.Enum):
    """What became of one block of a :meth:`kvstore.KVCache.get_each` call."""

    DELIVERED = "delivered"
    ABSENT = "absent"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    MISMATCH = "mismatch"
    """A record was there, but made for another key, namespace or spec."""


class ReadStatus(enum.Enum):
    """What a backend says about one name of a read."""

    OK = "ok"
    ABSENT = "absent"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    DENIED = "denied"
    SKIPPED = "skipped"
    """Not attempted: the call was cancelled, or it wanted leading names only and one was missing."""


class PutStatus(enum.Enum):
    """What became of one record of a put."""

    STORED = "stored"
    EXISTS = "exists"
    """The name was already stored; its age was refreshed."""
    FULL = "full"
    READ_ONLY = "read_only"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    DENIED = "denied"
    TOO_LARGE = "too_large"


READ_PRIORITY: Final = 0
WRITE_PRIORITY: Final = 1


@dataclass(frozen=True, slots=True)
class Run:
    """The sequence that the names of a call were taken from.

    Attributes:
        start: Absolute block index of ``names[0]`` in its prompt.
        names: Stored names of consecutive blocks, in order; a superset of the call's names.
    """

    start: int
    names: Sequence[bytes]


@dataclass(slots=True)
class Call:
    """Limits of one backend operation; a backend checks :meth:`stop` between records.

    Attributes:
        deadline: ``time.monotonic()`` value after which the caller no longer waits.
        priority: ``READ_PRIORITY`` before ``WRITE_PRIORITY``.
        leading_only: The caller wants the leading run of names only.  A backend may stop at the
            first name that is not there and report the rest as ``SKIPPED`` (reads) or ``ABSENT``
            (existence).
        run: The whole sequence around the names, for backends that declare ``PACKS``; None when the
            names are unrelated or their place in a prompt is not known.
    """

    deadline: float
    priority: int = READ_PRIORITY
    leading_only: bool = False
    run: Run | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def within(cls, seconds: float, *, priority: int = READ_PRIORITY, leading_only: bool = False) -> Call:
        """Make a call that ends ``seconds`` from now."""
        return cls(time.monotonic() + seconds, priority, leading_only)

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave up."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the backend to stop after the record it is working on."""
        self._cancelled.set()

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def stop(self) -> bool:
        """Whether to stop now: cancelled or past the deadline."""
        return self._cancelled.is_set() or time.monotonic() >= self.deadline
