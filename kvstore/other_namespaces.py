"""Other namespaces in the same tier: whether one of them holds what this one lacks, and how they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.backend import Capability
from kvstore.l2.names import name_prefix
from kvstore.namespace import NAMESPACE_BYTES, Namespace
from kvstore.types import Call, Presence, Run

if TYPE_CHECKING:
    from kvstore.backend import Backend
    from kvstore.keys import KVCacheKey
    from kvstore.spec import BlockSpec

MOST_ASKED: Final = 16
"""Namespaces that one call asks, those most like the own one first; each costs a question of the medium."""

Difference = Mapping[str, tuple[Any, Any]]
"""Fields as ``name: (own value, other's value)``."""


@dataclass(frozen=True, slots=True)
class OtherNamespace:
    """A namespace that a tier keeps a description of.

    Attributes:
        digest: Its 16 bytes.
        differences: Fields of the identity that differ, and those of the spec as ``spec.NAME``.
    """

    digest: bytes
    differences: Difference

    def describe(self, own_side: str = "here") -> str:
        """Say which fields differ, with both values; ``own_side`` says where one's own holds."""
        pairs = self.differences.items()
        said = [f"{name}: {own!r:.60} {own_side}, {other!r:.60} there" for name, (own, other) in pairs]
        return "; ".join(said) or "its description does not say in what"


@dataclass(frozen=True, slots=True)
class Sought:
    """Consecutive blocks, without the namespace that names them.

    Attributes:
        digests: Of the blocks, in order.
        kind: Of the key.
        start: Index of the first block in its sequence; -1 when that is not known.
    """

    digests: Sequence[bytes]
    kind: int
    start: int

    @classmethod
    def of(cls, key: KVCacheKey) -> Sought:
        """The blocks of a key."""
        return cls(key.digests, key.kind, key.start_block if key.position_known else -1)

    def names(self, namespace: bytes, epoch: bytes) -> list[bytes]:
        """Stored names in one epoch of a namespace."""
        prefix = name_prefix(namespace, epoch) + bytes([self.kind])
        return [prefix + digest for digest in self.digests]


def neighbours(documents: Sequence[bytes], namespace: Namespace, spec: BlockSpec) -> list[OtherNamespace]:
    """Read descriptions of other namespaces, the most similar first; what is no description is left out."""
    own = namespace.digest(spec)
    found = {}
    for text in documents:
        other = _read(text, namespace, spec)
        if other is not None and other.digest != own:
            found[other.digest] = other
    return sorted(found.values(), key=lambda other: (not other.differences, len(other.differences)))


def _read(text: bytes, namespace: Namespace, spec: BlockSpec) -> OtherNamespace | None:
    try:
        document = json.loads(text)
        digest = bytes.fromhex(document["digest"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if len(digest) != NAMESPACE_BYTES:
        return None
    try:
        other = Namespace.from_json(text)
    except (ValueError, TypeError, RecursionError):  # a newer release wrote it
        return OtherNamespace(digest, {})
    counting = {*namespace.identity_fields, *other.identity_fields, "include_engine_version"}
    differences = {name: pair for name, pair in namespace.diff(other).items() if name in counting}
    theirs = document.get("spec")
    if isinstance(theirs, dict):
        ours = json.loads(json.dumps(asdict(spec)))
        pairs = {f"spec.{name}": (ours[name], theirs.get(name)) for name in ours}
        differences |= {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return OtherNamespace(digest, differences)


def holders(
    backend: Backend, others: Sequence[OtherNamespace], sought: Sought, wanted: Sequence[int], call: Call
) -> dict[int, OtherNamespace]:
    """Ask for blocks under the names that other namespaces give them; waits for the medium.

    A namespace without an epoch gets one, as at any first access.

    Args:
        backend: Whose records.
        others: At most :data:`MOST_ASKED` of these are asked, in this order.
        sought: The blocks' sequence.
        wanted: Which of its blocks.
        call: Limits.

    Returns:
        For each block that some other namespace holds, the first such one.

    Raises:
        BackendError: The medium failed.
    """
    found: dict[int, OtherNamespace] = {}
    for other in others[:MOST_ASKED]:
        todo = [i for i in wanted if i not in found]
        if not todo or call.stop():
            break
        names = sought.names(other.digest, backend.epoch(other.digest))
        question = Call(call.deadline)
        if Capability.PACKS in backend.capabilities and sought.start >= 0:
            question.run = Run(sought.start, names)
        answers = backend.exists_many([names[i] for i in todo], question)
        found.update((i, other) for i, said in zip(todo, answers, strict=True) if said is Presence.PRESENT)
    return found
