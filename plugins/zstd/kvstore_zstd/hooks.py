"""What kvstore's plugin host loads: descriptors only, no numpy, no zstandard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.hookspecs import hookimpl
from kvstore.plugins import CodecPlugin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.codec import Codec


def _zstd() -> Codec:
    from kvstore_zstd.zstd_codec import ZstdCodec

    return ZstdCodec()


def _planes() -> Codec:
    from kvstore_zstd.planes import PlanesCodec

    return PlanesCodec()


def _planes_base() -> Codec:
    from kvstore_zstd.planes_base import PlanesBaseCodec

    return PlanesBaseCodec()


@hookimpl
def kvstore_register_codecs() -> Iterable[CodecPlugin]:
    """Offer the three codecs that are built on zstd."""
    return (
        CodecPlugin(name="zstd", codec_id=1, factory=_zstd, summary="zstd level 1 on the bytes; for 8-bit KV"),
        CodecPlugin(
            name="planes", codec_id=2, factory=_planes, summary="16-bit floats, about 1.46 times smaller; fast"
        ),
        CodecPlugin(
            name="planes-base",
            codec_id=3,
            factory=_planes_base,
            summary="16-bit floats, about 1.49 times smaller; for slow media and blocks of 16 tokens or more",
        ),
    )
