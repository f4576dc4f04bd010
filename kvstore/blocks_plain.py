"""The short way through verification, for records that are what they usually are."""

from __future__ import annotations

import struct
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.none_codec import NoneCodec
from kvstore.record import FORMAT_VERSION, HEADER_BYTES, MAGIC
from kvstore.segments import plan_segments
from kvstore.spec import BlockSpec

_CHECKSUM_AT: Final = 184
_ZEROS_8: Final = bytes(8)
_FLAGS: Final = frozenset({bytes(4), b"\x01\0\0\0"})  # parent known or not; no token ids, not keyed


class PlainRecords:
    """Recognizes sound raw records of one spec and namespace by comparing bytes.

    A raw record's head is constant but for identity, age and checksums, so a few comparisons of
    slices say all that the careful checks of :class:`~kvstore.blocks.BlockDecoder` would, in a
    fraction of the interpreter's work.  Whatever differs in any byte goes the careful way, which
    knows why.  Thread-safe.
    """

    def __init__(self, spec: BlockSpec, namespace: bytes) -> None:
        plan = plan_segments(spec)
        self._head_bytes = HEADER_BYTES + 16 * len(plan)
        self._record_bytes = self._head_bytes + spec.nbytes
        self._table = struct.Struct("<" + "IIQ" * len(plan))
        self._row = [value for g in plan for value in (g.raw_bytes, g.raw_bytes, 0)]
        self._spans = [
            (self._head_bytes + g.raw_offset, self._head_bytes + g.raw_offset + g.raw_bytes, 3 * i + 2)
            for i, g in enumerate(plan)
        ]
        self._start = struct.pack("<4sHH", MAGIC, FORMAT_VERSION, HEADER_BYTES)
        self._kind = struct.pack("<HBB", NoneCodec.codec_id, spec.dtype_id, spec.layout_id) + namespace
        self._fingerprint = spec.fingerprint()
        self._tokens = struct.pack("<I", spec.block_tokens)
        self._sizes = struct.pack("<IQQ", len(plan), spec.nbytes, spec.nbytes)

    def payload(self, record: memoryview, digest: bytes) -> memoryview | None:
        """The block's bytes inside ``record``, every one verified; None to look more carefully."""
        if len(record) != self._record_bytes:
            return None
        head = bytes(record[: self._head_bytes])
        if (
            head[32:64] != digest
            or head[:8] != self._start
            or head[8:12] not in _FLAGS
            or head[12:32] != self._kind
            or head[96:112] != self._fingerprint
            or head[116:120] != self._tokens
            or head[124:144] != self._sizes
            or head[152:_CHECKSUM_AT] != bytes(32)
        ):
            return None
        fields = head[:_CHECKSUM_AT] + _ZEROS_8 + head[HEADER_BYTES:]
        if xxh3_64_intdigest(fields) != int.from_bytes(head[_CHECKSUM_AT:HEADER_BYTES], "little"):
            return None
        row = self._row.copy()
        for start, end, at in self._spans:
            row[at] = xxh3_64_intdigest(record[start:end])
        if self._table.pack(*row) != head[HEADER_BYTES:]:
            return None
        return record[self._head_bytes :]
