"""Codecs by name and id, one instance per thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from kvstore.blocks import BlockDecoder, BlockEncoder
from kvstore.codec import Codec, CodecContext
from kvstore.errors import ConfigError, CorruptRecordError, PluginError
from kvstore.keyring import Keyring
from kvstore.l2.landing import RecordShape
from kvstore.record_tags import RecordTags

if TYPE_CHECKING:
    from kvstore.config import Config
    from kvstore.plugins import Registry
    from kvstore.spec import BlockSpec

_FALLBACK_CODEC = "zstd"  # for dtypes that the planes codecs do not support


@dataclass(frozen=True, slots=True)
class Coding:
    """What the config says about records.

    Attributes:
        codecs: Options of codecs, by name; the others are made from their defaults.
        record_keys: Keys that authenticate records, if any.
    """

    codecs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    record_keys: Keyring | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
        """Fetch the keys that a loaded config names.

        Raises:
            ConfigError: One of them is not available, or is no key.
        """
        sources = config.defaults.record_keys
        option = f"{config.source}: defaults.record_keys"
        return cls(config.codecs, Keyring.read(sources, option) if sources else None)


class _Local(threading.local):
    def __init__(self) -> None:
        self.codecs: dict[int, Codec | None] = {}
        self.being_made: set[int] = set()
        self.encoders: dict[str, BlockEncoder] = {}
        self.decoder: BlockDecoder | None = None


class CodecShelf:
    """Encoders and decoders of one cache for the calling thread.

    Codec objects keep scratch memory and compression contexts and must never be shared between
    threads (a shared zstandard context crashes the process), so each thread gets its own.

    Args:
        registry: Where codecs come from.
        spec: Spec of every block.
        namespace: 16-byte digest of the namespace.
        coding: Options and keys.
    """

    def __init__(self, registry: Registry, spec: BlockSpec, namespace: bytes, coding: Coding | None = None) -> None:
        self._registry = registry
        self._spec = spec
        self._namespace = namespace
        coding = Coding() if coding is None else coding
        self._options = coding.codecs
        self._tags = None if coding.record_keys is None else RecordTags(coding.record_keys, namespace)
        self._local = _Local()
        self.shape = RecordShape.of(spec, keyed=self._tags is not None)
        """Lengths of the records that the shelf's encoders make and its decoders take."""

    def check(self) -> None:
        """Make every codec that the config sets up, once, so that what is wrong with one is found out.

        Raises:
            ConfigError: Its options do not let it work.
            PluginError: It is not installed, or broken.
        """
        for name in self._options:
            self._codec(self._registry.codec(name).codec_id)

    def seals(self, name: str) -> bool:
        """Whether a codec seals; makes it, so that one which cannot be used is found out.

        Raises:
            ConfigError: Its options do not let it work, or it seals and does not support the spec.
            PluginError: It is not installed, or broken.
        """
        return self.encoder(name).seals

    def encoder(self, name: str) -> BlockEncoder:
        """The calling thread's encoder for a codec; the plugin must be installed."""
        encoder = self._local.encoders.get(name)
        if encoder is None:
            codec = self._codec(self._registry.codec(name).codec_id)
            fallback = None
            if name != "none" and codec is not None and not codec.seals and not codec.supports(self._spec):
                fallback = self._codec(self._registry.codec(_FALLBACK_CODEC).codec_id)
            encoder = BlockEncoder(self._spec, self._namespace, codec, fallback=fallback, tags=self._tags)
            self._local.encoders[name] = encoder
        return encoder

    def decoder(self) -> BlockDecoder:
        """The calling thread's decoder."""
        if self._local.decoder is None:
            self._local.decoder = BlockDecoder(self._spec, self._namespace, self._decoding, tags=self._tags)
        return self._local.decoder

    def _decoding(self, codec_id: int) -> Codec | None:
        """The codec that a record names, which need not be one that this cache is set up for."""
        try:
            return self._codec(codec_id)
        except ConfigError as e:
            raise CorruptRecordError("codec", f"codec {codec_id} is not set up here: {e}") from e

    def _codec(self, codec_id: int) -> Codec | None:
        local = self._local
        if codec_id in local.being_made:  # a codec that wraps itself
            return None
        if codec_id not in local.codecs:
            plugin = self._registry.codec_by_id(codec_id)
            local.being_made.add(codec_id)
            try:
                local.codecs[codec_id] = None if plugin is None else self._made(plugin.name)
            finally:
                local.being_made.discard(codec_id)
        return local.codecs[codec_id]

    def _made(self, name: str) -> Codec:
        options = self._options.get(name)
        context = None
        if options is not None:
            context = CodecContext(options, self._wrapped)
        return self._registry.create_codec(name, context)

    def _wrapped(self, wanted: str | int) -> Codec | None:
        """A codec of the calling thread, for another one that wraps it; None when it cannot be had.

        Raises:
            ConfigError: The one that is to encode is not set up.
        """
        if isinstance(wanted, int):
            try:
                return self._codec(wanted)
            except ConfigError:  # a stored segment names it, and not the config
                return None
        try:
            return self._codec(self._registry.codec(wanted).codec_id)
        except PluginError:
            return None
