"""A reader of records written from ``docs/reference/record-format.md`` and ``codecs.md`` alone, slow and simple.

It says what a record holds, and trusts it: structure and checksums are the business of the reader
under test.  What that delivers must be what this one finds.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvstore.spec import BlockSpec
from tests.fuzz.worlds import World, sealing_key
from tests.unit.record.conftest import FIELDS

FLAG_TOKEN_IDS, FLAG_KEYED, FLAG_SEALED = 2, 4, 8
HEADER_BYTES: Final = 192
SEGMENT_TARGET: Final = 262144
SEALED_OVERHEAD: Final = 36  # key id 4, inner codec 2, reserved 2, nonce 12, tag 16


def field(record: bytes | bytearray, name: str) -> Any:
    """One field of a header."""
    offset, form = FIELDS[name]
    return struct.unpack_from(form, record, offset)[0]


def row_bytes(record: bytes | bytearray) -> int:
    """Length of a row of the segment table."""
    return 32 if field(record, "flags") & FLAG_KEYED else 16


def rows(record: bytes | bytearray) -> list[tuple[int, int, int]]:
    """Stored length, raw length and checksum of each segment, as far as the record goes."""
    step = row_bytes(record)
    n = min(field(record, "n_segments"), (len(record) - HEADER_BYTES) // step)
    return [struct.unpack_from("<IIQ", record, HEADER_BYTES + step * i) for i in range(n)]


def segments(record: bytes) -> list[bytes]:
    """The stored bytes of each segment."""
    table = rows(record)
    at, found = HEADER_BYTES + row_bytes(record) * len(table), []
    for stored_bytes, _, _ in table:
        found.append(record[at : at + stored_bytes])
        at += stored_bytes
    return found


def cut(spec: BlockSpec) -> list[tuple[int, tuple[int, ...], int]]:
    """First item, shape and raw bytes of each segment of a block."""
    n_items = spec.shape[0]
    item = spec.nbytes // n_items
    step = max(1, round(SEGMENT_TARGET / item))
    pieces = []
    for first in range(0, n_items, step):
        items = min(step, n_items - first)
        pieces.append((first, (items, *spec.shape[1:]), items * item))
    return pieces


def block_in(world: World, record: bytes) -> bytes:
    """The block that a record holds."""
    stored = segments(record)
    if field(record, "flags") & FLAG_TOKEN_IDS:
        stored.pop()
    codec_id = field(record, "codec")
    parts = []
    for piece, place in zip(stored, cut(world.spec), strict=True):
        if field(record, "flags") & FLAG_SEALED:
            parts.append(unsealed(world, field(record, "digest"), piece, place))
        else:
            parts.append(piece if len(piece) == place[2] else decoded(world.spec, codec_id, piece, place))
    return b"".join(parts)


def unsealed(world: World, digest: bytes, stored: bytes, place: tuple[int, tuple[int, ...], int]) -> bytes:
    """Decrypt a segment of codec 4 and undo the codec inside."""
    prefix, nonce, ciphertext = stored[:8], stored[8:20], stored[20:]
    _, inner, _ = struct.unpack("<IHH", prefix)
    plain = cipher_of(world).decrypt(nonce, ciphertext, bound(prefix, world.namespace + digest, place))
    return plain if inner == 0 else decoded(world.spec, inner, plain, place)


def sealed(world: World, digest: bytes, plain: bytes, inner: int, key_id: int = 1) -> bytes:
    """Encrypt what may be anything for the first segment of a block, with the right key."""
    prefix, nonce, place = struct.pack("<IHH", key_id, inner, 0), bytes(12), cut(world.spec)[0]
    return prefix + nonce + cipher_of(world).encrypt(nonce, plain, bound(prefix, world.namespace + digest, place))


def cipher_of(world: World) -> AESGCM:
    """AES-256-GCM with the namespace's key."""
    hkdf = HKDF(algorithm=SHA256(), length=32, salt=b"kvstore/aes-gcm/1", info=world.namespace)
    return AESGCM(hkdf.derive(sealing_key()))


def bound(prefix: bytes, block: bytes, place: tuple[int, tuple[int, ...], int]) -> bytes:
    """The additional data of a sealed segment."""
    return b"kvstore/aes-gcm\x01" + prefix + block + struct.pack("<QQ", place[0], place[2])


def decoded(spec: BlockSpec, codec_id: int, stored: bytes, place: tuple[int, tuple[int, ...], int]) -> bytes:
    """Undo codec 1, 2 or 3."""
    if codec_id == 1:
        return inflated(stored)
    count, *_ = struct.unpack_from("<I", stored)
    lengths = struct.unpack_from(f"<{count}I", stored, 4)
    shape = place[1]
    elements = int(np.prod(shape))
    at = 4 + 4 * count
    low = np.frombuffer(stored, np.uint8, elements, at).astype(np.uint16)
    at += elements
    frames = []
    for length in lengths:
        frames.append(np.frombuffer(inflated(stored[at : at + length]), np.uint8))
        at += length
    c, n = spec.axes.index("C"), spec.axes.index("N")
    planes = max(1, shape[c])
    with_table = codec_id == 3 and count == planes + 1
    table = frames.pop(0).reshape(planes, -1) if with_table else None
    high = _plane_major(frames, table, shape, (c, n)).reshape(-1).astype(np.uint16)
    if codec_id == 2:
        return (high << 8 | low).astype("<u2").tobytes()
    return ((low & 0x80) << 8 | high << 7 | low & 0x7F).astype("<u2").tobytes()


def _plane_major(
    frames: list[npt.NDArray[np.uint8]],
    table: npt.NDArray[np.uint8] | None,
    shape: tuple[int, ...],
    axes: tuple[int, int],
) -> npt.NDArray[np.uint8]:
    """Put the planes of keys and of values where they belong, plus what is typical of their channels."""
    c, n = axes
    whole = np.zeros(shape, np.uint8)
    view = np.moveaxis(whole, c, 0)  # keys and values first
    n_in_plane = n if n < c else n - 1
    if len(frames) == 1:
        view = view.reshape(1, *view.shape[1:]) if shape[c] == 1 else view[np.newaxis]
        n_in_plane = n_in_plane if shape[c] == 1 else n_in_plane + 1
    for i, frame in enumerate(frames):
        plane = frame.reshape(view[i].shape)
        if table is not None:
            channels = [size for axis, size in enumerate(plane.shape) if axis != n_in_plane]
            plane = plane + np.expand_dims(table[i].reshape(channels), n_in_plane)  # modulo 256
        view[i] = plane
    return whole


def inflated(frame: bytes) -> bytes:
    """One whole zstd frame and nothing behind it."""
    stream = zstandard.ZstdDecompressor().decompressobj()
    content = stream.decompress(frame)
    if not stream.eof or stream.unused_data:
        raise AssertionError("not exactly one frame")
    return content
