"""Blocks to records and back: the only door between a block's bytes and what a medium stores.

:class:`BlockEncoder` makes the record of a block, :class:`BlockDecoder` verifies a record down to
the last byte before it lets anything reach a caller's memory.
"""

from __future__ import annotations

from kvstore.blocks_decode import BlockDecoder
from kvstore.blocks_encode import RAW_THRESHOLD, BlockEncoder, EncodedRecord
from kvstore.blocks_open import OpenBlock, SegmentTable
from kvstore.none_codec import NoneCodec

__all__ = ["RAW_THRESHOLD", "BlockDecoder", "BlockEncoder", "EncodedRecord", "NoneCodec", "OpenBlock", "SegmentTable"]
