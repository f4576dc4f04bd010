"""The codec with keys that are given in the test, segments of every kind, and their place in a block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kvstore_aesgcm.gcm_codec import AesGcmCodec
from kvstore_aesgcm.options import AesGcmOptions

from kvstore import BlockSpec
from kvstore.codec import Codec, CodecContext
from kvstore.plugins import Registry
from kvstore.segments import SegmentGeometry, plan_segments

KEY_1, KEY_2 = "11" * 32, "22" * 32
NAMESPACE, DIGEST = bytes(range(16)), bytes(range(100, 132))
SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=32, block_tokens=16, dtype="bfloat16")
FP8 = BlockSpec(layers=4, kv_heads=2, head_dim=32, block_tokens=16, dtype="float8_e4m3fn")


def key_1() -> str:
    """A source, ``call:tests.unit.aesgcm.sealing:key_1``, also for other processes."""
    return KEY_1


def key_2() -> bytes:
    """Another one."""
    return bytes.fromhex(KEY_2)


def keys(*pairs: tuple[int, str]) -> tuple[str, ...]:
    """Sources of keys with numbers."""
    functions = {KEY_1: key_1.__name__, KEY_2: key_2.__name__}
    return tuple(f"{key_id}=call:{__name__}:{functions[key]}" for key_id, key in pairs)


def codec_of(*pairs: tuple[int, str], inner: str = "planes", begun: bool = True) -> AesGcmCodec:
    """A codec whose first key encrypts, with the installed codecs around it."""
    registry = Registry.discover()
    found: dict[int, Codec] = {}

    def find(wanted: str | int) -> Codec | None:
        plugin = registry.codec_by_id(wanted) if isinstance(wanted, int) else registry.codec(wanted)
        if plugin is None:
            return None
        return found.setdefault(plugin.codec_id, registry.create_codec(plugin.name))

    codec = AesGcmCodec(CodecContext(AesGcmOptions(keys=keys(*(pairs or ((1, KEY_1),))), inner=inner), find))
    if begun:
        codec.begin(NAMESPACE, DIGEST)
    return codec


def geometry(spec: BlockSpec = SPEC) -> SegmentGeometry:
    return plan_segments(spec)[0]


def gauss(spec: BlockSpec = SPEC, seed: int = 0) -> memoryview:
    """The first segment of a block as models make them, which the inner codec shortens."""
    nbytes = geometry(spec).raw_bytes
    words = np.random.default_rng(seed).standard_normal(nbytes // spec.itemsize, np.float32)
    bits = words.view(np.uint32) >> (16 if spec.itemsize == 2 else 24)
    return memoryview(bits.astype(np.uint16 if spec.itemsize == 2 else np.uint8).tobytes()).toreadonly()


def noise(spec: BlockSpec = SPEC, seed: int = 0) -> memoryview:
    """A first segment that nothing shortens."""
    return memoryview(np.random.default_rng(seed).bytes(geometry(spec).raw_bytes)).toreadonly()


def opened(codec: Codec, stored: bytes | memoryview, where: SegmentGeometry) -> bytes:
    out = bytearray(where.raw_bytes)
    codec.open_segment(memoryview(bytes(stored)), where).write_into(memoryview(out))
    return bytes(out)


def regions(stored: bytes) -> Sequence[tuple[str, range]]:
    """The byte regions of a stored segment as docs/reference/codecs.md lays them out."""
    return (
        ("key id", range(4)),
        ("inner codec id", range(4, 6)),
        ("reserved", range(6, 8)),
        ("nonce", range(8, 20)),
        ("ciphertext", range(20, len(stored) - 16)),
        ("tag", range(len(stored) - 16, len(stored))),
    )
