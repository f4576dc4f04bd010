"""Stores at rest for the tests of the commands that look into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvstore.backend import Backend, BackendContext, PutItem
from kvstore.blocks import BlockEncoder
from kvstore.keys import KVCacheKey, TokenKey
from kvstore.l2.names import name_prefix
from kvstore.namespace import Namespace
from kvstore.plugins import Registry
from kvstore.record import RecordMeta
from kvstore.spec import BlockSpec
from kvstore.types import Call, PutStatus

DATA = Path(__file__).parents[2] / "data"
SPEC = BlockSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
NAMESPACE = Namespace(model="smollm2-135m", revision="r1")
BLOCKS = ("bf16_prose_b000_16tok_LCND", "bf16_prose_b032_16tok_LCND", "bf16_json_b064_16tok_LCND")


@contextmanager
def opened(path: Path, *, capacity_bytes: int = 64 << 20) -> Iterator[Backend]:
    """An LMDB store, open for writing."""
    registry = Registry.discover()
    options = registry.backend("lmdb").options(path=str(path))
    backend = registry.create_backend("lmdb")
    backend.open(
        BackendContext(
            tier="lmdb",
            options=options,
            capacity_bytes=capacity_bytes,
            namespace=NAMESPACE.digest(SPEC),
            namespace_json=NAMESPACE.to_json(SPEC),
        )
    )
    try:
        yield backend
    finally:
        backend.close()


def key() -> TokenKey:
    return KVCacheKey.from_tokens(range(16 * len(BLOCKS)), block_tokens=16)


def fill(path: Path, codecs: Sequence[str] = ("none", "planes", "planes")) -> list[bytes]:
    """Store real KV blocks as one sequence; return their stored names."""
    namespace = NAMESPACE.digest(SPEC)
    with opened(path) as backend:
        prefix = name_prefix(namespace, backend.epoch(namespace))
        names = [prefix + bytes([key().kind]) + digest for digest in key().digests]
        parents = [None, *key().digests]
        for i, (name, block, codec) in enumerate(zip(names, BLOCKS, codecs, strict=True)):
            encoder = BlockEncoder(SPEC, namespace, Registry.discover().create_codec(codec))
            raw = memoryview(np.load(DATA / f"{block}.npy")).cast("B")
            record = encoder.encode(raw, RecordMeta(name[17:], parents[i], i))
            put(backend, name, record.buffers)
    return names


def put(backend: Backend, name: bytes, buffers: Sequence[memoryview | bytes]) -> None:
    assert backend.put_many([PutItem(name, buffers)], Call.within(5)) == [PutStatus.STORED]


def read(path: Path, name: bytes) -> bytes:
    found: list[bytes] = []
    with opened(path) as backend:
        backend.get_many([name], lambda _, view: found.append(bytes(view)), Call.within(5))
    return b"".join(found)


def damage(path: Path, name: bytes, at: int) -> None:
    """Replace a record by a copy with one changed byte."""
    record = bytearray(read(path, name))
    record[at] ^= 0x40
    with opened(path) as backend:
        backend.delete_many([name], Call.within(5))
        put(backend, name, [bytes(record[:192]), bytes(record[192:])])
