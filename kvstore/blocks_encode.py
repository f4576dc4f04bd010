"""Blocks to records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.blocks_memory import as_bytes, check_namespace, segment_view
from kvstore.codec import Codec
from kvstore.errors import ConfigError, PluginError
from kvstore.none_codec import NoneCodec
from kvstore.record import (
    FLAG_KEYED,
    FLAG_PARENT_UNKNOWN,
    FLAG_SEALED,
    FLAG_TOKEN_IDS,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    Head,
    RecordMeta,
    SegmentEntry,
    pack_head,
)
from kvstore.record_tags import RecordTags, segment_tag
from kvstore.segments import MAX_SEAL_BYTES, plan_segments
from kvstore.spec import BlockSpec

RAW_THRESHOLD: Final = 0.95
"""A first segment that stays above this fraction of raw sends the whole block raw: decoding costs
more than the device time that so few bytes save."""

_ZEROS_16: Final = bytes(16)
_ZEROS_32: Final = bytes(32)

Buffer = memoryview | bytes


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """One record as a gather list.

    Attributes:
        buffers: The head first, then the payload in order.  They borrow the encoder's scratch
            memory and the raw block: valid until :meth:`BlockEncoder.recycle` is called or the raw
            block changes, whichever comes first.
        nbytes: Length of the record.
        codec_id: Codec named in the header: the one really used, 0 for raw.
        header_checksum: Names this very record, see :meth:`kvstore.backend.Backend.discard`.
    """

    buffers: list[Buffer]
    nbytes: int
    codec_id: int
    header_checksum: int

    @property
    def stored_raw(self) -> bool:
        """Whether the payload is the block itself."""
        return self.codec_id == NoneCodec.codec_id


class BlockEncoder:
    """Makes records of blocks of one spec and namespace.

    An instance belongs to one thread, as its codec does.

    Args:
        spec: Spec of every block.
        namespace: 16-byte digest of the namespace.
        codec: Codec to try; None for raw.
        fallback: Codec to try instead where ``codec`` does not support ``spec`` (8-bit KV under a
            codec for 16-bit floats); None for raw.
        clock: Source of the creation time, in Unix seconds.
        tags: Makes the records keyed; None for plain ones.

    Raises:
        ConfigError: ``codec`` seals and does not support ``spec``: nothing may take its place.
        ValueError: ``namespace`` is not 16 bytes long.
    """

    def __init__(  # noqa: PLR0913 - what a record is made from
        self,
        spec: BlockSpec,
        namespace: bytes,
        codec: Codec | None,
        *,
        fallback: Codec | None = None,
        clock: Callable[[], float] = time.time,
        tags: RecordTags | None = None,
    ) -> None:
        check_namespace(namespace)
        if codec is not None and codec.seals and not codec.supports(spec):
            msg = f"codec {codec.name!r} cannot seal blocks of dtype {spec.dtype}, layout {spec.layout}; choose another"
            raise ConfigError(msg)
        usable = (c for c in (codec, fallback) if c is not None and c.supports(spec))
        self._codec = next(usable, None)
        if self._codec is not None and self._codec.codec_id == NoneCodec.codec_id:
            self._codec = None
        self._spec = spec
        self._spec_nbytes = spec.nbytes
        self._namespace = namespace
        self._fingerprint = spec.fingerprint()
        self._plan = plan_segments(spec)
        self._clock = clock
        self._sealer = self._codec if self._codec is not None and self._codec.seals else None
        self._key = None if tags is None else tags.writing

    @property
    def seals(self) -> bool:
        """Whether the records hide what they hold."""
        return self._sealer is not None

    def encode(self, raw: memoryview, meta: RecordMeta) -> EncodedRecord:
        """Make the record of one block; a raw record borrows ``raw`` and copies nothing.

        Args:
            raw: The block's ``spec.nbytes`` bytes, C-contiguous.
            meta: Where the block stands; ``token_ids`` must cover the whole block when given.  A
                sealed record does not have them.

        Raises:
            PluginError: A sealing codec gave what cannot be stored as sealed.
            ValueError: ``raw`` or ``meta.token_ids`` has the wrong length.
        """
        raw = as_bytes(raw)
        if len(raw) != self._spec_nbytes:
            msg = f"a block of this spec has {self._spec_nbytes} bytes, got {len(raw)}"
            raise ValueError(msg)
        segments: list[SegmentEntry] = []
        codec_id = NoneCodec.codec_id
        sealer = self._sealer
        payload = self._encode(raw, segments) if sealer is None else self._seal(sealer, raw, meta.digest, segments)
        if payload is None:
            payload = [raw]
            segments = [self._raw_entry(segment_view(raw, geometry)) for geometry in self._plan]
        elif self._codec is not None:
            codec_id = self._codec.codec_id
        if meta.token_ids is not None:
            self._check_token_ids(meta.token_ids)
            if sealer is None:
                payload.append(meta.token_ids)
                segments.append(self._raw_entry(meta.token_ids))
        head, checksum = pack_head(self._head(codec_id, meta, segments), segments, self._key)
        nbytes = len(head) + sum(entry.stored_bytes for entry in segments)
        return EncodedRecord([head, *payload], nbytes, codec_id, checksum)

    def recycle(self) -> None:
        """Reuse scratch memory: the records made so far are no longer needed."""
        if self._codec is not None:
            self._codec.recycle()

    def _encode(self, raw: memoryview, segments: list[SegmentEntry]) -> list[Buffer] | None:
        """Encode all segments, filling in ``segments``; None when the block goes raw."""
        codec = self._codec
        if codec is None:
            return None
        payload: list[Buffer] = []
        for geometry in self._plan:
            piece = segment_view(raw, geometry)
            stored = codec.encode_segment(piece, geometry)
            if not payload and (stored is None or len(stored) > RAW_THRESHOLD * len(piece)):
                return None
            if stored is None or len(stored) >= len(piece):
                stored = piece
            payload.append(stored)
            segments.append(self._entry(stored, len(piece)))
        return payload

    def _seal(self, codec: Codec, raw: memoryview, digest: bytes, segments: list[SegmentEntry]) -> list[Buffer]:
        """Encode all segments, none of which may be stored as it is."""
        codec.begin(self._namespace, digest)
        payload: list[Buffer] = []
        for geometry in self._plan:
            stored = codec.encode_segment(segment_view(raw, geometry).toreadonly(), geometry)
            if stored is None or not 0 < len(stored) <= geometry.raw_bytes + MAX_SEAL_BYTES:
                given = "nothing" if stored is None else f"{len(stored)} bytes"
                msg = f"codec {codec.name!r} seals {geometry.raw_bytes} bytes into {given}; the block is not stored"
                raise PluginError(msg)
            payload.append(stored)
            segments.append(self._entry(stored, geometry.raw_bytes))
        return payload

    def _entry(self, stored: Buffer, raw_bytes: int) -> SegmentEntry:
        # checksummed here, while the bytes are still in the cache
        tag = b"" if self._key is None else segment_tag(self._key, stored)
        return SegmentEntry(len(stored), raw_bytes, xxh3_64_intdigest(stored), tag)

    def _raw_entry(self, piece: Buffer) -> SegmentEntry:
        return self._entry(piece, len(piece))

    def _check_token_ids(self, token_ids: bytes) -> None:
        if len(token_ids) != 4 * self._spec.block_tokens:
            msg = f"token_ids has {len(token_ids)} bytes; a block of {self._spec.block_tokens} tokens needs 4 each"
            raise ValueError(msg)

    def _head(self, codec_id: int, meta: RecordMeta, segments: Sequence[SegmentEntry]) -> Head:
        flags = 0 if meta.parent_known else FLAG_PARENT_UNKNOWN
        if self._sealer is not None:
            flags |= FLAG_SEALED
        elif meta.token_ids is not None:
            flags |= FLAG_TOKEN_IDS
        if self._key is not None:
            flags |= FLAG_KEYED
        return Head(
            magic=MAGIC,
            format_version=FORMAT_VERSION,
            header_bytes=HEADER_BYTES,
            flags=flags,
            codec_id=codec_id,
            dtype_id=self._spec.dtype_id,
            layout_id=self._spec.layout_id,
            namespace=self._namespace,
            digest=meta.digest,
            parent=meta.parent or _ZEROS_32,
            fingerprint=self._fingerprint,
            block_index=meta.block_index,
            block_tokens=self._spec.block_tokens,
            group=meta.group,
            n_segments=len(segments),
            raw_bytes=self._spec_nbytes,
            stored_bytes=sum(entry.stored_bytes for entry in segments),
            created=max(0, int(self._clock())),
            tag=_ZEROS_16,
            reserved=_ZEROS_16,
            checksum=0,
        )
