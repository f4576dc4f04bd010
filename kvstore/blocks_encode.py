"""Blocks to records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.blocks_memory import as_bytes, check_namespace, segment_view
from kvstore.codec import Codec
from kvstore.none_codec import NoneCodec
from kvstore.record import (
    FLAG_PARENT_UNKNOWN,
    FLAG_TOKEN_IDS,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    Head,
    RecordMeta,
    SegmentEntry,
    pack_head,
)
from kvstore.segments import plan_segments
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

    Raises:
        ValueError: ``namespace`` is not 16 bytes long.
    """

    def __init__(
        self,
        spec: BlockSpec,
        namespace: bytes,
        codec: Codec | None,
        *,
        fallback: Codec | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_namespace(namespace)
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

    def encode(self, raw: memoryview, meta: RecordMeta) -> EncodedRecord:
        """Make the record of one block; a raw record borrows ``raw`` and copies nothing.

        Args:
            raw: The block's ``spec.nbytes`` bytes, C-contiguous.
            meta: Where the block stands; ``token_ids`` must cover the whole block when given.

        Raises:
            ValueError: ``raw`` or ``meta.token_ids`` has the wrong length.
        """
        raw = as_bytes(raw)
        if len(raw) != self._spec_nbytes:
            msg = f"a block of this spec has {self._spec_nbytes} bytes, got {len(raw)}"
            raise ValueError(msg)
        segments: list[SegmentEntry] = []
        codec_id = NoneCodec.codec_id
        payload = self._encode(raw, segments)
        if payload is None:
            payload = [raw]
            segments = [_raw_entry(segment_view(raw, geometry)) for geometry in self._plan]
        elif self._codec is not None:
            codec_id = self._codec.codec_id
        if meta.token_ids is not None:
            self._check_token_ids(meta.token_ids)
            payload.append(meta.token_ids)
            segments.append(_raw_entry(meta.token_ids))
        head, checksum = pack_head(self._head(codec_id, meta, segments), segments)
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
            # checksummed here, while the bytes are still in the cache
            segments.append(SegmentEntry(len(stored), len(piece), xxh3_64_intdigest(stored)))
        return payload

    def _check_token_ids(self, token_ids: bytes) -> None:
        if len(token_ids) != 4 * self._spec.block_tokens:
            msg = f"token_ids has {len(token_ids)} bytes; a block of {self._spec.block_tokens} tokens needs 4 each"
            raise ValueError(msg)

    def _head(self, codec_id: int, meta: RecordMeta, segments: Sequence[SegmentEntry]) -> Head:
        flags = 0 if meta.parent_known else FLAG_PARENT_UNKNOWN
        if meta.token_ids is not None:
            flags |= FLAG_TOKEN_IDS
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


def _raw_entry(piece: Buffer) -> SegmentEntry:
    return SegmentEntry(len(piece), len(piece), xxh3_64_intdigest(piece))
