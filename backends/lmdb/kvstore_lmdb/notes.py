"""The ``notes`` tree: format, capacity, epochs and unfinished drops, changed in transactions."""

from __future__ import annotations

import os
import struct
from typing import Any, Final

from kvstore.errors import BackendPermissionError, BackendUnavailableError
from kvstore_lmdb.environment import Environment

FORMAT_VERSION: Final = 2
"""2: index lines name the parent and say how many bytes the children have.  A store of format 1 is
read as it is and becomes one of format 2 when it is opened for writing."""

_READABLE: Final = (1, FORMAT_VERSION)
EPOCH_BYTES: Final = 8
NO_EPOCH: Final = bytes(EPOCH_BYTES)  # of a namespace that a read-only store does not know; no name is made with it
_FORMAT: Final = b"format"
_CAPACITY: Final = b"capacity"
_EPOCH: Final = b"epoch:"
_DROP: Final = b"drop:"
_TICK: Final = b"tick"
_U64: Final = struct.Struct("<Q")

Transaction = Any  # lmdb.Transaction is generic in the stubs only


def check_format(environment: Environment) -> None:
    """Write the format version into a new store and refuse an unknown one.

    Raises:
        BackendUnavailableError: A newer kvstore wrote the store.
    """
    tree = environment.trees.notes
    with environment.env.begin(db=tree) as txn:
        found = txn.get(_FORMAT)
    version = None if found is None else int.from_bytes(found, "little")
    if version is not None and version not in _READABLE:
        raise BackendUnavailableError(
            f"{environment.data.parent} has store format {version}, this kvstore reads "
            f"{FORMAT_VERSION} and older; upgrade kvstore or name another directory"
        )
    if version != FORMAT_VERSION and not environment.read_only:
        with environment.env.begin(db=tree, write=True) as txn:
            txn.put(_FORMAT, _U64.pack(FORMAT_VERSION))


def stored_capacity(environment: Environment, txn: Transaction) -> int | None:
    """Return the capacity that the last opener set, in bytes; None in a new store."""
    found = txn.get(_CAPACITY, db=environment.trees.notes)
    return None if found is None else int(_U64.unpack(found)[0])


def store_capacity(environment: Environment, capacity_bytes: int) -> None:
    """Set the capacity for every process."""
    with environment.env.begin(db=environment.trees.notes, write=True) as txn:
        txn.put(_CAPACITY, _U64.pack(capacity_bytes))


def epoch(environment: Environment, namespace: bytes, *, bump: bool, writable: bool) -> bytes:
    """Return a namespace's epoch; make a random one when absent or ``bump``.

    Raises:
        BackendPermissionError: ``bump`` on a read-only store.
    """
    if bump and not writable:
        raise BackendPermissionError(f"{environment.data.parent} is read-only; its epoch cannot be changed")
    tree, key = environment.trees.notes, _EPOCH + namespace
    if not bump:
        with environment.env.begin(db=tree) as txn:
            found = txn.get(key)
        if found is not None:
            return bytes(found)
        if not writable:
            return NO_EPOCH
    with environment.write_lock, environment.env.begin(db=tree, write=True) as txn:
        found = None if bump else txn.get(key)
        if found is None:
            found = os.urandom(EPOCH_BYTES)
            txn.put(key, found)
        return bytes(found)


def request_drop(environment: Environment, prefix: bytes) -> None:
    """Remember that records of a prefix are to be reclaimed; survives a restart."""
    with environment.write_lock, environment.env.begin(db=environment.trees.notes, write=True) as txn:
        txn.put(_DROP + prefix, b"")


def next_drop(environment: Environment, txn: Transaction) -> bytes | None:
    """Return a prefix that is not yet reclaimed."""
    with txn.cursor(db=environment.trees.notes) as cursor:
        if cursor.set_range(_DROP) and bytes(cursor.key()).startswith(_DROP):
            return bytes(cursor.key())[len(_DROP) :]
    return None


def finish_drop(environment: Environment, txn: Transaction, prefix: bytes) -> None:
    """Forget a prefix of which nothing is left."""
    txn.delete(_DROP + prefix, db=environment.trees.notes)


def tick(environment: Environment) -> None:
    """Commit next to nothing: what the last transaction freed becomes reusable only one later."""
    with environment.env.begin(db=environment.trees.notes, write=True) as txn:
        txn.put(_TICK, _U64.pack(txn.id() & (1 << 64) - 1))
