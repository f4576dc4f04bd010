"""What is known about a record that failed verification."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import CorruptRecordError
from kvstore.types import Run


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that failed verification.

    Attributes:
        name: Its stored name.
        header_checksum: Tells it from a good copy that may have replaced it; None when nothing of
            it was read.
        error: What is wrong with it.
        run: The sequence around it, as in :class:`~kvstore.types.Call`.
    """

    name: bytes
    header_checksum: int | None
    error: CorruptRecordError
    run: Run | None = None
