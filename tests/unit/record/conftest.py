"""An implementation of the record format of its own, straight from the table of offsets."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import pytest
import xxhash
from kvstore_zstd.planes import PlanesCodec
from kvstore_zstd.planes_base import PlanesBaseCodec
from kvstore_zstd.zstd_codec import ZstdCodec

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import Codec
from kvstore.record import RecordMeta
from kvstore.spec import BlockSpec

FIELDS: Final[dict[str, tuple[int, str]]] = {
    "magic": (0, "<4s"),
    "format_version": (4, "<H"),
    "header_len": (6, "<H"),
    "flags": (8, "<I"),
    "codec": (12, "<H"),
    "dtype": (14, "<B"),
    "layout": (15, "<B"),
    "namespace": (16, "<16s"),
    "digest": (32, "<32s"),
    "parent": (64, "<32s"),
    "fingerprint": (96, "<16s"),
    "block_index": (112, "<I"),
    "block_tokens": (116, "<I"),
    "group": (120, "<I"),
    "n_segments": (124, "<I"),
    "raw_len": (128, "<Q"),
    "stored_len": (136, "<Q"),
    "created": (144, "<Q"),
    "tag": (152, "<16s"),
    "zero": (168, "<16s"),
    "checksum": (184, "<Q"),
}
CODECS: Final[dict[str, Callable[[], Codec] | None]] = {
    "none": None,
    "zstd": ZstdCodec,
    "planes": PlanesCodec,
    "planes-base": PlanesBaseCodec,
}
SPEC: Final = BlockSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=8, dtype="bfloat16")
NAMESPACE: Final = bytes(range(16))
DIGEST: Final = bytes(range(32))


class Layout:
    """Reads, patches and reseals records without kvstore's code."""

    @staticmethod
    def read(record: bytes, field: str) -> Any:
        offset, form = FIELDS[field]
        return struct.unpack_from(form, record, offset)[0]

    @staticmethod
    def patch(record: bytes, field: str, value: Any) -> bytes:
        offset, form = FIELDS[field]
        changed = bytearray(record)
        struct.pack_into(form, changed, offset, value)
        return bytes(changed)

    @classmethod
    def table(cls, record: bytes) -> list[tuple[int, int, int]]:
        n = cls.read(record, "n_segments")
        return [struct.unpack_from("<IIQ", record, 192 + 16 * i) for i in range(n)]

    @classmethod
    def payloads(cls, record: bytes) -> list[bytes]:
        table = cls.table(record)
        offset, found = 192 + 16 * len(table), []
        for stored, _, _ in table:
            found.append(record[offset : offset + stored])
            offset += stored
        return found

    @staticmethod
    def seal(record: bytes) -> bytes:
        """Recompute the header checksum over the header and the table as they are."""
        head_len = 192 + 16 * struct.unpack_from("<I", record, 124)[0]
        digest = xxhash.xxh3_64_intdigest(record[:184] + bytes(8) + record[192:head_len])
        return record[:184] + struct.pack("<Q", digest) + record[192:]

    @classmethod
    def forge(cls, record: bytes, payloads: list[bytes], raw_lens: list[int] | None = None) -> bytes:
        """A record with other segments and every checksum right."""
        lens = raw_lens or [raw for _, raw, _ in cls.table(record)]
        table = b"".join(
            struct.pack("<IIQ", len(stored), raw, xxhash.xxh3_64_intdigest(stored))
            for stored, raw in zip(payloads, lens, strict=True)
        )
        head = cls.patch(record[:192], "n_segments", len(payloads))
        head = cls.patch(head, "stored_len", sum(map(len, payloads)))
        return cls.seal(head + table + b"".join(payloads))


class Bench:
    """One spec, one namespace, all codecs."""

    spec = SPEC
    namespace = NAMESPACE
    digest = DIGEST
    layout = Layout

    def __init__(self) -> None:
        self.decoder = BlockDecoder(SPEC, NAMESPACE, self.codec)

    @staticmethod
    def codec(codec_id: int) -> Codec | None:
        return {1: ZstdCodec, 2: PlanesCodec, 3: PlanesBaseCodec}.get(codec_id, lambda: None)()

    @staticmethod
    def raw(spec: BlockSpec = SPEC) -> bytes:
        """Words with few exponents, so that every codec pays."""
        words = random.Random(5).randbytes(spec.nbytes)
        return b"".join(bytes((words[i], 0x3F)) for i in range(0, len(words), 2))

    def record(self, raw: bytes, codec: str = "none", **meta: Any) -> bytes:
        make = CODECS[codec]
        encoder = BlockEncoder(SPEC, NAMESPACE, make and make(), clock=lambda: 1_700_000_000.9)
        encoded = encoder.encode(memoryview(raw), RecordMeta(**{"digest": DIGEST, **meta}))
        record = b"".join(encoded.buffers)
        assert len(record) == encoded.nbytes
        assert encoded.codec_id == list(CODECS).index(codec)
        return record

    def read(self, record: bytes, digest: bytes = DIGEST) -> bytes:
        """Decode with guard bytes around the destination."""
        memory = bytearray(b"\xaa" * (SPEC.nbytes + 128))
        try:
            self.decoder.open(memoryview(record), digest).write_into(memoryview(memory)[64:-64])
        except BaseException:
            assert memory == b"\xaa" * len(memory), "the destination was touched"
            raise
        assert memory[:64] == memory[-64:] == b"\xaa" * 64
        return bytes(memory[64:-64])


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(params=list(CODECS))
def codec_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
