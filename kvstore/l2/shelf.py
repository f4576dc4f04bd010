"""Codecs by name and id, one instance per thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.l2.landing import RecordShape

if TYPE_CHECKING:
    from kvstore.codec import Codec
    from kvstore.plugins import Registry
    from kvstore.spec import BlockSpec

_FALLBACK_CODEC = "zstd"  # for dtypes that the planes codecs do not support


class _Local(threading.local):
    def __init__(self) -> None:
        self.codecs: dict[int, Codec | None] = {}
        self.encoders: dict[str, BlockEncoder] = {}
        self.decoder: BlockDecoder | None = None


class CodecShelf:
    """Encoders and decoders of one cache for the calling thread.

    Codec objects keep scratch memory and compression contexts and must never be shared between
    threads (a shared zstandard context crashes the process), so each thread gets its own.
    """

    def __init__(self, registry: Registry, spec: BlockSpec, namespace: bytes) -> None:
        self._registry = registry
        self._spec = spec
        self._namespace = namespace
        self._local = _Local()
        self.shape = RecordShape.of(spec)
        """Lengths of the records that the shelf's encoders make and its decoders take."""

    def encoder(self, name: str) -> BlockEncoder:
        """The calling thread's encoder for a codec; the plugin must be installed."""
        encoder = self._local.encoders.get(name)
        if encoder is None:
            codec = self._codec(self._registry.codec(name).codec_id)
            fallback = None
            if name != "none" and codec is not None and not codec.supports(self._spec):
                fallback = self._codec(self._registry.codec(_FALLBACK_CODEC).codec_id)
            encoder = BlockEncoder(self._spec, self._namespace, codec, fallback=fallback)
            self._local.encoders[name] = encoder
        return encoder

    def decoder(self) -> BlockDecoder:
        """The calling thread's decoder."""
        if self._local.decoder is None:
            self._local.decoder = BlockDecoder(self._spec, self._namespace, self._codec)
        return self._local.decoder

    def _codec(self, codec_id: int) -> Codec | None:
        if codec_id not in self._local.codecs:
            plugin = self._registry.codec_by_id(codec_id)
            self._local.codecs[codec_id] = None if plugin is None else self._registry.create_codec(plugin.name)
        return self._local.codecs[codec_id]
