"""Stored names: the tier's epoch, the kind of key and the digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.backend import Backend, Capability
from kvstore.types import Call, Run

if TYPE_CHECKING:
    from kvstore.l2.part import Part


def name_prefix(namespace: bytes, epoch: bytes) -> bytes:
    """First 16 bytes of every stored name: the namespace with the tier's epoch mixed in."""
    return hashlib.sha256(b"kvstore-name-v1" + namespace + epoch).digest()[:16]


class TierNames:
    """Makes the names of one namespace in one tier; thread-safe.

    Methods that ask the backend for its epoch raise what it raises and take as long as it takes.

    Args:
        backend: Whose epoch counts.
        namespace: 16-byte digest.
        on_new_epoch: Called when another process has begun a new epoch.
    """

    def __init__(self, backend: Backend, namespace: bytes, on_new_epoch: Callable[[], None]) -> None:
        self._backend = backend
        self._namespace = namespace
        self._on_new_epoch = on_new_epoch
        self._packs = bool(backend.capabilities & Capability.PACKS)
        self._named: tuple[bytes, bytes] | None = None  # (epoch, name prefix), replaced as one
        self._newest: tuple[bytes, Sequence[bytes], Run] | None = None  # chunks of one key share their run

    def prefix(self, kind: int) -> bytes:
        """17-byte start of the names of one key kind in the tier's current epoch."""
        epoch = self._backend.epoch(self._namespace)
        named = self._named
        if named is None or named[0] != epoch:
            changed = named is not None
            named = (epoch, name_prefix(self._namespace, epoch))
            self._named = named
            if changed:  # another process cleared this namespace
                self._on_new_epoch()
        return named[1] + bytes([kind])

    def known_prefix(self, kind: int) -> bytes | None:
        """Like ``prefix``, in the epoch that was seen last; None when none was, and asks nobody."""
        named = self._named
        return None if named is None else named[1] + bytes([kind])

    def of(self, kind: int, digests: Sequence[bytes]) -> list[bytes]:
        """Names of unrelated blocks."""
        prefix = self.prefix(kind)
        return [prefix + digest for digest in digests]

    def of_part(self, part: Part, call: Call) -> list[bytes]:
        """Names of some blocks of a key; tells ``call`` of the sequence where the backend can use it."""
        key = part.key
        prefix = self.prefix(key.kind)
        if not (self._packs and key.position_known):
            return [prefix + digest for digest in part.digests]
        run = self._run(prefix, key.start_block, key.digests)
        call.run = run
        return [run.names[i] for i in part.indices]

    def _run(self, prefix: bytes, start: int, digests: Sequence[bytes]) -> Run:
        newest = self._newest
        if newest is not None and newest[1] is digests and newest[0] == prefix and newest[2].start == start:
            return newest[2]
        run = Run(start, [prefix + digest for digest in digests])
        self._newest = (prefix, digests, run)
        return run

    def renew(self) -> bytes:
        """Begin a new epoch, let the backend reclaim the old one and return the new one."""
        old = name_prefix(self._namespace, self._backend.epoch(self._namespace))
        epoch = self._backend.epoch(self._namespace, bump=True)
        self._named = (epoch, name_prefix(self._namespace, epoch))
        self._backend.drop(old)
        return epoch
