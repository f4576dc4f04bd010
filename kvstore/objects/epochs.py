"""The notes beside the records: epochs and the readable descriptions of namespaces."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Final

from kvstore.errors import BackendPermissionError, NotSupportedError
from kvstore.objects.naming import DESCRIPTIONS, description_key, epoch_key
from kvstore.objects.store import ObjectStore

_EPOCH_BYTES: Final = 8
_MAX_DESCRIPTION_BYTES: Final = 1 << 20  # one has about 1 KiB
_MAX_DESCRIPTIONS: Final = 64  # a request each
_NO_EPOCH: Final = bytes(_EPOCH_BYTES)  # where none can be kept: nothing was stored there, so any value will do


class Epochs:
    """Epochs of namespaces, cached for a bounded time.  Thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[bytes, float]] = {}

    def get(self, namespace: bytes, *, bump: bool) -> bytes:
        """Return the epoch; see :meth:`kvstore.backend.Backend.epoch`."""
        known = self._known.get(namespace)
        if known is not None and not bump and time.monotonic() < known[1]:
            return known[0]
        with self._lock:
            return self._refresh(namespace, bump=bump)

    def _refresh(self, namespace: bytes, *, bump: bool) -> bytes:
        known = self._known.get(namespace)
        if known is not None and not bump and time.monotonic() < known[1]:
            return known[0]  # another thread asked meanwhile
        asked = time.monotonic()
        epoch = self._create(namespace, once=False) if bump else self._read(namespace)
        while epoch is None:
            epoch = self._create(namespace, once=True) or self._read(namespace)
        self._known[namespace] = (epoch, asked + self._store.settings.epoch_age_s)
        return epoch

    def _read(self, namespace: bytes) -> bytes | None:
        """The stored epoch; None when there is none that can be used."""
        body = self._store.medium.read(epoch_key(namespace), self._store.call())
        if body is None:
            return None
        with body:
            epoch = bytearray(min(body.nbytes, _EPOCH_BYTES))
            sound = body.nbytes == _EPOCH_BYTES
            body.read_into(memoryview(epoch))
        if not sound and not self._store.context.read_only:
            return self._create(namespace, once=False)
        return bytes(epoch) if sound else _NO_EPOCH

    def _create(self, namespace: bytes, *, once: bool) -> bytes | None:
        if self._store.context.read_only:
            if once:
                return _NO_EPOCH
            msg = f"tier {self._store.context.tier!r} is open read-only: a new epoch is refused"
            raise BackendPermissionError(msg)
        epoch = os.urandom(_EPOCH_BYTES)
        key = epoch_key(namespace)
        try:
            written = self._store.medium.write(key, [epoch], self._store.call(), once=once, blocks=0)
        except NotSupportedError:
            if once:
                return _NO_EPOCH
            raise
        return epoch if written or not once else None

    def describe(self, namespace: bytes, text: str) -> None:
        """Keep the readable description beside the records; an existing one stays."""
        key = description_key(namespace)
        self._store.medium.write(key, [text.encode()], self._store.call(), once=True, blocks=0)

    def description(self, namespace: bytes) -> bytes | None:
        """Read the description again; None when there is none, or one too long to be ours."""
        body = self._store.medium.read(description_key(namespace), self._store.call())
        if body is None:
            return None
        with body:
            if body.nbytes > _MAX_DESCRIPTION_BYTES:
                return None
            text = bytearray(body.nbytes)
            body.read_into(memoryview(text))
        return bytes(text)

    def descriptions(self) -> list[bytes]:
        """Read the descriptions of all namespaces, up to a bound; an absent one is left out.

        Raises:
            BackendError: The medium failed.
        """
        call, found = self._store.call(), []
        listed = self._store.medium.entries(DESCRIPTIONS, call)
        for info in itertools.islice(listed, _MAX_DESCRIPTIONS):
            body = self._store.medium.read(info.key, call) if info.nbytes <= _MAX_DESCRIPTION_BYTES else None
            if body is None:
                continue
            with body:
                text = bytearray(body.nbytes)
                body.read_into(memoryview(text))
            found.append(bytes(text))
        return found
