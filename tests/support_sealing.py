"""A codec that seals, for tests of what the core owes to such codecs; it is no cryptography."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from kvstore.codec import Codec, CodecContext, OpenSegment
from kvstore.errors import ConfigError, CorruptRecordError
from kvstore.hookspecs import hookimpl
from kvstore.plugins import CodecPlugin, Registry
from kvstore.segments import SegmentGeometry
from kvstore.spec import BlockSpec
from kvstore.types import option

NAME: Final = "xor-seal"
NONCE_BYTES: Final = 8
EXTRA_BYTES: Final = 40
"""Nonce and a digest of 32 bytes in front of each segment."""

_ENCODED: Final = b"\1"
_RAW: Final = b"\0"


@dataclass(frozen=True)
class XorOptions:
    """``[codecs.xor-seal]``."""

    phrase: str | None = option(None, doc="What everybody must know.", secret=True)
    inner: str = option("none", doc="Codec that encodes first.")
    weight: int = option(1, doc="A number.")


@dataclass(frozen=True)
class _Whole(OpenSegment):
    raw: bytes

    def write_into(self, out: memoryview) -> None:
        out[:] = self.raw


class XorCodec(Codec):
    """XOR with a stream that phrase, namespace, block and nonce decide; 40 bytes longer than raw at most."""

    codec_id = 90
    name = NAME
    seals = True

    def __init__(self, context: CodecContext) -> None:
        options: XorOptions = context.options
        if options.phrase is None:
            msg = "codecs.xor-seal.phrase is not set; give it one"
            raise ConfigError(msg)
        self._phrase = options.phrase.encode()
        self._inner = context.codec(options.inner)
        self._block: bytes | None = None
        self.begun: list[bytes] = []

    def begin(self, namespace: bytes, digest: bytes) -> None:
        assert (len(namespace), len(digest)) == (16, 32)
        self._block = namespace + digest
        self.begun.append(digest)

    def _stream(self, nonce: bytes, nbytes: int) -> bytes:
        assert self._block is not None, "begin was not called"
        return hashlib.shake_128(self._phrase + self._block + nonce).digest(nbytes)

    def supports(self, spec: BlockSpec) -> bool:
        return spec.block_tokens != 13

    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> bytes:
        inner = (
            self._inner.encode_segment(raw, geometry) if self._inner and self._inner.supports(geometry.spec) else None
        )
        plain = bytes(raw) if inner is None or len(inner) + 1 > len(raw) else _ENCODED + bytes(inner)
        nonce = secrets.token_bytes(NONCE_BYTES)
        check = hashlib.blake2b(plain, key=self._stream(nonce, 32), digest_size=32).digest()
        return nonce + check + _xor(plain, self._stream(nonce, len(plain)))

    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> OpenSegment:
        if not EXTRA_BYTES < len(stored) <= EXTRA_BYTES + geometry.raw_bytes:
            raise CorruptRecordError("codec", "wrong length")
        nonce, check = bytes(stored[:NONCE_BYTES]), bytes(stored[NONCE_BYTES:EXTRA_BYTES])
        plain = _xor(bytes(stored[EXTRA_BYTES:]), self._stream(nonce, len(stored) - EXTRA_BYTES))
        if hashlib.blake2b(plain, key=self._stream(nonce, 32), digest_size=32).digest() != check:
            raise CorruptRecordError("codec", "sealed for another block, or damaged")
        if len(plain) == geometry.raw_bytes:
            return _Whole(plain)
        if self._inner is None:
            raise CorruptRecordError("codec", "no inner codec")
        return self._inner.open_segment(memoryview(plain)[1:], geometry)

    def recycle(self) -> None:
        if self._inner is not None:
            self._inner.recycle()


def _xor(a: bytes, b: bytes) -> bytes:
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


def sealing_registry(*, codec: type[Codec] = XorCodec, options: type[object] | None = XorOptions) -> Registry:
    """All that is installed, and the codec that seals."""
    registry = Registry.discover()
    module = ModuleType("hooks_of_the_sealing_codec")

    @hookimpl
    def kvstore_register_codecs() -> list[CodecPlugin]:
        return [CodecPlugin(name=codec.name, codec_id=codec.codec_id, factory=codec, summary="seals", options=options)]

    module.kvstore_register_codecs = kvstore_register_codecs  # type: ignore[attr-defined]
    registry.register(module, "sealing-codec")
    return registry
