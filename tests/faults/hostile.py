"""Records as somebody makes them who may write to a store and knows its formats, for one spec."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
import zstandard
from kvstore_zstd.zstd_codec import ZstdCodec

from kvstore.blocks import BlockEncoder
from kvstore.keyring import Keyring
from kvstore.record import RecordMeta
from kvstore.record_tags import RecordTags
from tests.support_faults import NAMESPACE, SMALL, unrelated
from tests.unit.record.conftest import Layout

TINY_FRAME: Final = bytes.fromhex("28b52ffde06c06060663636363")  # 13 bytes that declare 7.2e18
SKIPPABLE: Final = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
GIB: Final = 1 << 30


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def pickled(path: Path) -> bytes:
    return pickle.dumps(Touch(path))


def torch_saved(path: Path) -> bytes:
    out = io.BytesIO()
    torch.save({"kv": torch.zeros(4), "more": Touch(path)}, out)
    return out.getvalue()


@functools.cache
def gibibyte_frame() -> bytes:
    """About 32 KiB that produce 1 GiB."""
    stream = zstandard.ZstdCompressor(level=1).compressobj(size=GIB)
    mebibyte = bytes(1 << 20)
    return b"".join(stream.compress(mebibyte) for _ in range(1 << 10)) + stream.flush()


def sound(i: int) -> bytes:
    """A sound record of ``unrelated(i)``, compressed with zstd; its block is all zeros."""
    encoder = BlockEncoder(SMALL, NAMESPACE.digest(SMALL), ZstdCodec())
    record = b"".join(encoder.encode(memoryview(bytes(SMALL.nbytes)), RecordMeta(unrelated(i)[0])).buffers)
    assert Layout.read(record, "codec") == ZstdCodec.codec_id
    return record


def keyed(i: int, keys: Keyring, tag: bytes | None = None) -> bytes:
    """A sound record of ``unrelated(i)`` that the ring's first key made, or one with another tag; all zeros."""
    namespace = NAMESPACE.digest(SMALL)
    encoder = BlockEncoder(SMALL, namespace, None, tags=RecordTags(keys, namespace))
    record = b"".join(encoder.encode(memoryview(bytes(SMALL.nbytes)), RecordMeta(unrelated(i)[0])).buffers)
    return record if tag is None else _checked(Layout.patch(record, "tag", tag))


def moved(record: bytes, digest: bytes) -> bytes:
    """The record of one block, made to look like that of another by who knows how checksums go."""
    return _checked(Layout.patch(record, "digest", digest))


def _checked(record: bytes) -> bytes:
    end = 192 + (32 if Layout.read(record, "flags") & 4 else 16) * Layout.read(record, "n_segments")
    checksum = xxhash.xxh3_64_intdigest(record[:184] + bytes(8) + record[192:end])
    return Layout.patch(record, "checksum", checksum)


def forgeries(trap: Path) -> Iterator[tuple[str, int, bytes]]:
    """What to plant: a name, the number of its key, a record; nothing of it may ever be delivered.

    Args:
        trap: File that nobody may create.
    """
    for number, (name, make) in enumerate(_forgeries(trap)):
        yield name, number, make(sound(number))


def _forgeries(trap: Path) -> Iterator[tuple[str, Any]]:
    nbytes = SMALL.nbytes
    frame = zstandard.compress(bytes(nbytes))
    yield "pickle", lambda _: pickled(trap)
    yield "torch.save", lambda _: torch_saved(trap)
    yield "pickle behind a head", lambda r: r[:208] + pickled(trap)
    yield "pickle as a segment", lambda r: Layout.forge(r, [pickled(trap)])
    for name, payload in {
        "frame that declares 7.2e18 bytes": TINY_FRAME,
        "frame that produces 1 GiB": gibibyte_frame(),
        "two frames": frame + frame,
        "frame and junk": frame + b"\0",
        "skippable frame first": SKIPPABLE + frame,
        "skippable frame last": frame + SKIPPABLE,
        "skippable frame alone": SKIPPABLE,
        "one byte less": zstandard.compress(bytes(nbytes - 1)),
        "one byte more": zstandard.compress(bytes(nbytes + 1)),
        "no frame": b"\xff" * 200,
        "cut frame": frame[:-1],
    }.items():
        yield name, functools.partial(lambda r, payload: Layout.forge(r, [payload]), payload=payload)
    fields: dict[str, list[Any]] = {
        "raw_len": [2**63, 2**64 - 1, 0, GIB],
        "stored_len": [2**63, 2**64 - 1, 0],
        "n_segments": [2**31, 2**32 - 1, 0, 65_536],
        "dtype": [255],
        "layout": [255],
        "codec": [63, 65_535],
        "fingerprint": [b"f" * 16],
        "block_tokens": [2**32 - 1],
        "format_version": [0, 2, 65_535],
        "flags": [2, 8, 10, 12, 16, 2**32 - 1],
        "tag": [b"t" * 16],
        "namespace": [b"n" * 16],
        "digest": [b"d" * 32],
    }
    for field, values in fields.items():
        for value in values:
            yield f"{field} {value!r}", functools.partial(_patched, field=field, value=value)
    yield "table of 2**31 and 2**31", lambda r: Layout.forge(r, [r[208:], r[208:]], [2**31, 2**31])
    yield "segment of 4 GiB", lambda r: Layout.forge(r, [r[208:]], [2**32 - 1])
    yield "keyed, without a key", _keyed
    yield "a head alone", lambda r: r[:192]
    yield "a head with its table", lambda r: r[:208]
    yield "one byte", lambda r: r[:1]


def _patched(record: bytes, field: str, value: Any) -> bytes:
    """One field changed, and the checksum made right where the header still says where the table is."""
    changed = Layout.patch(record, field, value)
    return Layout.seal(changed) if Layout.read(changed, "n_segments") == 1 else changed


def _keyed(record: bytes) -> bytes:
    head = Layout.patch(Layout.patch(record[:192], "flags", 4), "tag", b"t" * 16)
    keyed = head + record[192:208] + b"k" * 16 + record[208:]
    checksum = xxhash.xxh3_64_intdigest(keyed[:184] + bytes(8) + keyed[192:224])
    return Layout.patch(keyed, "checksum", checksum)
