"""Where hostile records are read: specs, codecs and keys, with sound records and the blocks they hold.

The order of :data:`WORLDS` is part of the corpus: inputs name a world by its place.  Append only.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Final

from kvstore_aesgcm.gcm_codec import AesGcmCodec
from kvstore_aesgcm.options import AesGcmOptions
from kvstore_zstd.planes import PlanesCodec
from kvstore_zstd.planes_base import PlanesBaseCodec
from kvstore_zstd.zstd_codec import ZstdCodec

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import Codec, CodecContext
from kvstore.keyring import Keyring, SecretKey
from kvstore.none_codec import NoneCodec
from kvstore.record import RecordMeta
from kvstore.record_tags import RecordTags
from kvstore.spec import BlockSpec

NAMESPACE: Final = bytes(range(16))
RING: Final = Keyring(
    [SecretKey(7, b"a key of 32 bytes, the newer one"), SecretKey(1, b"a key of 32 bytes, the older one")]
)
FOREIGN_RING: Final = Keyring([SecretKey(7, b"the key of somebody else, 32 byt")])
CLOCK: Final = 1_700_000_000.0
KNOWN: Final = (b"A" * 32, b"B" * 32)
"""Digests of the blocks that every world has a record of."""

UNKNOWN: Final = b"C" * 32


def sealing_key() -> bytes:
    """What ``call:tests.fuzz.worlds:sealing_key`` names."""
    return b"a key for blocks at rest, 32 byt"


@dataclass(frozen=True)
class World:
    """One way in which records are made and read.

    Attributes:
        spec: Of every block.
        codec: Name of the codec that records are made with; ``"aes-gcm"`` and ``"aes-gcm/none"`` seal.
        keyed: Whether records carry tags and the reader demands them.
        token_ids: Whether records hold the block's token ids.
        namespace: Digest of the namespace.
    """

    spec: BlockSpec
    codec: str = "none"
    keyed: bool = False
    token_ids: bool = False
    namespace: bytes = NAMESPACE

    @property
    def sealed(self) -> bool:
        """Whether blocks are encrypted."""
        return self.codec.startswith("aes-gcm")

    def tags(self, ring: Keyring = RING) -> RecordTags | None:
        """What makes and checks tags; None where records have none."""
        return RecordTags(ring, self.namespace) if self.keyed else None

    def make(self, digest: bytes, raw: bytes, ring: Keyring = RING) -> bytes:
        """The sound record of a block."""
        ids = random.Random(digest).randbytes(4 * self.spec.block_tokens) if self.token_ids else None
        meta = RecordMeta(digest, parent=b"P" * 32, block_index=3, group=1, token_ids=ids)
        codec = codec_named(self.codec)
        encoder = BlockEncoder(
            *(self.spec, self.namespace, codec), fallback=ZstdCodec(), clock=lambda: CLOCK, tags=self.tags(ring)
        )
        return b"".join(encoder.encode(memoryview(raw), meta).buffers)

    def reader(self) -> BlockDecoder:
        """A decoder of this world's records."""
        return BlockDecoder(self.spec, self.namespace, codec_of_id, tags=self.tags())


@dataclass(frozen=True)
class Sound:
    """What a world holds: the blocks by digest, their records, and a reader that is used again and again."""

    world: World
    blocks: dict[bytes, bytes]
    records: dict[bytes, bytes]
    reader: BlockDecoder
    memory: bytearray


def codec_named(name: str) -> Codec:
    """A fresh codec; what follows a slash is the inner codec of a sealing one."""
    outer, _, inner = name.partition("/")
    if outer == "aes-gcm":
        options = AesGcmOptions(keys=("call:tests.fuzz.worlds:sealing_key",), inner=inner or "planes")
        return AesGcmCodec(
            CodecContext(options, lambda key: _plain_codec(key) if isinstance(key, int) else _BY_NAME[key]())
        )
    return _BY_NAME[outer]()


_BY_NAME: Final[dict[str, type[Codec]]] = {
    "none": NoneCodec,
    "zstd": ZstdCodec,
    "planes": PlanesCodec,
    "planes-base": PlanesBaseCodec,
}


def _plain_codec(codec_id: int) -> Codec | None:
    return next((make() for make in _BY_NAME.values() if make.codec_id == codec_id), None)


def codec_of_id(codec_id: int) -> Codec | None:
    """The codecs that readers have."""
    return codec_named("aes-gcm") if codec_id == AesGcmCodec.codec_id else _plain_codec(codec_id)


def _small(dtype: str, **more: object) -> BlockSpec:
    shape: dict[str, object] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "block_tokens": 8, "dtype": dtype}
    return BlockSpec(**{**shape, **more})  # type: ignore[arg-type]  # a table of keyword arguments


BF16: Final = _small("bfloat16")
# two segments: 256 KiB and one byte; three of 175 KiB
TWO_SEGMENTS: Final = BlockSpec.opaque((256 << 10) + 1, block_tokens=4, tag="tail")
THREE_SEGMENTS: Final = BlockSpec(layers=3, kv_heads=7, head_dim=400, block_tokens=16, dtype="bfloat16")

WORLDS: Final = (
    World(BF16),
    World(BF16, "zstd"),
    World(BF16, "planes"),
    World(BF16, "planes-base"),
    World(BF16, "planes", token_ids=True),
    World(BF16, keyed=True),
    World(BF16, "planes-base", keyed=True, token_ids=True),
    World(BF16, "aes-gcm"),
    World(BF16, "aes-gcm/none", keyed=True),
    World(_small("float16", layout="NCLD"), "planes-base"),
    World(_small("float16", layout="LNHCD"), "planes"),
    World(_small("float32"), "zstd", token_ids=True),
    World(_small("float8_e4m3fn", layout="NLCD"), "zstd"),
    World(_small("float8_e5m2", layout="LCHND"), "aes-gcm"),
    World(_small("int8", layout="CLND")),
    World(_small("uint8", layout="CNLD"), "zstd", keyed=True),
    World(_small("bfloat16", kv=1, head_dim=9), "planes-base"),
    World(BlockSpec.opaque(321, block_tokens=5, tag="engine"), "zstd"),
    World(BF16, "planes", namespace=bytes(16)),
    World(TWO_SEGMENTS, "zstd", token_ids=True),
    World(THREE_SEGMENTS, "planes-base"),
    World(THREE_SEGMENTS, "aes-gcm"),
)

LARGE: Final = frozenset(i for i, world in enumerate(WORLDS) if world.spec.nbytes > 64 << 10)
"""Places of the worlds whose records take a while."""


@functools.cache
def sound(index: int) -> Sound:
    """The content of the world at that place, made once."""
    world = WORLDS[index]
    blocks = {digest: block_of(world.spec, digest) for digest in KNOWN}
    records = {digest: world.make(digest, raw) for digest, raw in blocks.items()}
    return Sound(world, blocks, records, world.reader(), bytearray(world.spec.nbytes + 128))


def block_of(spec: BlockSpec, digest: bytes) -> bytes:
    """Bytes with few different high ones, as KV has, so that every codec pays."""
    rng = random.Random(digest)
    low = rng.randbytes(spec.nbytes)
    if spec.itemsize == 1:
        return bytes(b & 0x07 for b in low)
    mixed = bytearray(low)
    mixed[1::2] = bytes(0x3E | b & 0x81 for b in rng.randbytes(len(mixed[1::2])))
    return bytes(mixed)
