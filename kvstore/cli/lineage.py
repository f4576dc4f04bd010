"""The blocks before one block, as the records themselves name them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvstore.backend import Capability
from kvstore.explain import Cause
from kvstore.record import HEADER_BYTES, unpack_head
from kvstore.types import Call

if TYPE_CHECKING:
    from kvstore.cli.prompts import Asked
    from kvstore.cli.resting import Look, Resting
    from kvstore.record import Head

_MOST: Final = 1 << 16  # blocks that one walk goes back
_READ_S: Final = 60.0


def ancestry(look: Look, asked: Asked, block: Resting) -> Iterator[str]:
    """Say where one block stands, and whether all blocks before it are in the same tier.

    Raises:
        BackendError: The medium failed.
    """
    where = f"tier {look.store.tier.name!r}"
    if block.cause is not Cause.PRESENT:
        return
    if block.position < 0:
        yield f"{where}: its place in a prompt is not known"
        return
    place = f"{where}: it is block {block.position} of its prompt"
    if block.parent is None or block.position == 0:
        yield f"{place}, so nothing stands before it"
        return
    if Capability.PACKS in look.store.backend.capabilities:
        yield f"{place}; name the prompt with --tokens or --hashes to see the blocks before it"
        return
    missing = _first_missing(look, asked, block.parent, block.position - 1)
    if missing is None:
        yield f"{place}, and all blocks before it are there"
    else:
        yield f"{place}, but block {missing} before it is missing: a prefix read ends there, unless another tier has it"


def _first_missing(look: Look, asked: Asked, parent: bytes, position: int) -> int | None:
    """Go back from parent to parent; the index of the first block that is not there."""
    for _ in range(_MOST):
        head = _header(look, asked, parent)
        if head is None:
            return position
        if not head.parent_known or not any(head.parent) or position <= 0:
            return None
        parent, position = head.parent, position - 1
    return None


def _header(look: Look, asked: Asked, digest: bytes) -> Head | None:
    """The header of one record, as it is; None when there is none."""
    received: list[Head] = []

    def receive(_: int, view: memoryview) -> None:
        if view.nbytes >= HEADER_BYTES:
            received.append(unpack_head(view))

    for kind in asked.kinds:
        names = look.names(replace(asked, digests=(digest,)), kind)
        look.store.backend.get_ranges(names, [(0, HEADER_BYTES)], receive, Call.within(_READ_S))
    return received[0] if received else None
