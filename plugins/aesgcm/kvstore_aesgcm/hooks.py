"""What kvstore's plugin host loads: descriptors only, no cryptography."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.hookspecs import hookimpl
from kvstore.plugins import CodecPlugin
from kvstore_aesgcm.options import NAME, AesGcmOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.codec import Codec, CodecContext


def _aes_gcm(context: CodecContext) -> Codec:
    try:
        from kvstore_aesgcm.gcm_codec import AesGcmCodec
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "cryptography":
            raise
        msg = f"codec {NAME!r} needs the package cryptography; pip install 'llm-kvstore[encryption]'"
        raise ConfigError(msg) from e
    return AesGcmCodec(context)


@hookimpl
def kvstore_register_codecs() -> Iterable[CodecPlugin]:
    """Offer the codec that encrypts."""
    return (
        CodecPlugin(
            name=NAME,
            codec_id=4,
            factory=_aes_gcm,
            options=AesGcmOptions,
            summary="encryption at rest: AES-256-GCM around another codec, keys from file, environment or function",
        ),
    )
