"""The codec ``aes-gcm``: AES-256-GCM around another codec."""

from __future__ import annotations

import os
from typing import ClassVar, Final

from cryptography.exceptions import InvalidTag

from kvstore.blocks import RAW_THRESHOLD
from kvstore.codec import Codec, CodecContext, OpenSegment
from kvstore.errors import ConfigError, CorruptRecordError
from kvstore.none_codec import NoneCodec, RawSegment
from kvstore.segments import SegmentGeometry
from kvstore.spec import BlockSpec
from kvstore_aesgcm.namespace_keys import NamespaceKeys
from kvstore_aesgcm.options import INNER_OPTION, KEYS_OPTION, NAME, AesGcmOptions
from kvstore_aesgcm.sealed import NONCE_BYTES, SealedSegment, bound_data, prefix_of

_FALLBACK: Final = "zstd"  # what the core takes, too, where a codec does not support a block


class AesGcmCodec(Codec):
    """Shortens a segment with another codec and encrypts the result.

    Nonces are random: at most 2**32 segments may be written with one key in one namespace (NIST SP
    800-38D, 8.3), about 1 PiB of segments of 256 KiB; rotate the key before.

    Args:
        context: The plugin's options, and where other codecs are found.

    Raises:
        ConfigError: There is no key, or the inner codec does not exist or encrypts itself.
    """

    codec_id: ClassVar[int] = 4
    name: ClassVar[str] = NAME
    seals: ClassVar[bool] = True

    def __init__(self, context: CodecContext) -> None:
        options: AesGcmOptions = context.options
        self._keys = NamespaceKeys(options.keyring)
        self._find = context.codec
        self._inner: dict[int, Codec] = {}
        self._choices = self._writing(options.inner)
        self._block: bytes | None = None
        self._shortens = True

    def begin(self, namespace: bytes, digest: bytes) -> None:
        """Bind what follows to a block."""
        self._keys.use(namespace)
        self._block = namespace + digest
        self._shortens = True

    def supports(self, spec: BlockSpec) -> bool:  # noqa: ARG002 - every spec
        """Everything can be encrypted."""
        return True

    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> bytes:
        """Shorten the segment where that pays and encrypt it under a fresh nonce."""
        plain, inner_id = self._shortened(raw, geometry)
        key_id, cipher = self._keys.current
        prefix, nonce = prefix_of(key_id, inner_id), os.urandom(NONCE_BYTES)
        return b"".join((prefix, nonce, cipher.encrypt(nonce, plain, self._bound(prefix, geometry))))

    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> OpenSegment:
        """Authenticate and decrypt, then let the inner codec check what came out.

        Raises:
            CorruptRecordError: ``tag`` when the bytes were not encrypted with this key for this
                place; ``codec`` when they are no encrypted segment, or key or inner codec are missing.
        """
        sealed = SealedSegment.parse(stored, geometry.raw_bytes)
        cipher = self._keys.find(sealed.key_id)
        if cipher is None:
            raise CorruptRecordError("codec", f"{KEYS_OPTION} has no key of id {sealed.key_id}")
        try:
            plain = cipher.decrypt(sealed.nonce, sealed.ciphertext, self._bound(sealed.prefix, geometry))
        except InvalidTag as e:
            detail = f"the tag of an encrypted segment does not fit key {sealed.key_id} and its place"
            raise CorruptRecordError("tag", detail) from e
        content = memoryview(plain)
        if sealed.inner_id == NoneCodec.codec_id:
            return RawSegment(content)
        return self._reading(sealed.inner_id).open_segment(content, geometry)

    def recycle(self) -> None:
        """Recycle the inner codecs."""
        for codec in self._inner.values():
            codec.recycle()

    def _bound(self, prefix: bytes, geometry: SegmentGeometry) -> bytes:
        if self._block is None:
            raise RuntimeError("begin() must say which block a segment belongs to before it is encrypted or opened")
        return bound_data(prefix, self._block, geometry)

    def _shortened(self, raw: memoryview, geometry: SegmentGeometry) -> tuple[memoryview | bytes, int]:
        """What is to be encrypted, and the codec it went through.

        As in records that are not encrypted, a first segment that hardly shrinks decides for its block.
        """
        codec = next((c for c in self._choices if c.supports(geometry.spec)), None) if self._shortens else None
        if codec is not None:
            shorter = codec.encode_segment(raw, geometry)
            if shorter is not None and len(shorter) <= RAW_THRESHOLD * len(raw):
                return shorter, codec.codec_id
            self._shortens = False
        return raw, NoneCodec.codec_id

    def _writing(self, inner: str) -> tuple[Codec, ...]:
        """The codecs to try before encrypting, the configured one first."""
        if inner == NoneCodec.name:
            return ()
        codec = None if inner == NAME else self._find(inner)
        if codec is None or codec.seals:
            msg = f"{INNER_OPTION} is {inner!r}, expected the name of an installed codec that does not encrypt"
            raise ConfigError(msg)
        found = (codec, None if inner == _FALLBACK else self._find(_FALLBACK))
        choices = tuple(c for c in found if c is not None)
        self._inner.update({c.codec_id: c for c in choices})
        return choices

    def _reading(self, codec_id: int) -> Codec:
        codec = self._inner.get(codec_id)
        if codec is None:
            codec = None if codec_id == self.codec_id else self._find(codec_id)
            if codec is None or codec.seals:
                raise CorruptRecordError("codec", f"no codec of id {codec_id} is installed for an encrypted segment")
            self._inner[codec_id] = codec
        return codec
