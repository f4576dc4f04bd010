"""Settings of the codec: which keys, and what happens to a block before it is encrypted."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from kvstore.errors import ConfigError
from kvstore.keyring import Keyring, is_source
from kvstore.types import option

NAME: Final = "aes-gcm"
KEYS_OPTION: Final = f"codecs.{NAME}.keys"
INNER_OPTION: Final = f"codecs.{NAME}.inner"


@dataclass(frozen=True)
class AesGcmOptions:
    """The config's ``[codecs.aes-gcm]`` section."""

    keys: tuple[str, ...] = option(
        (),
        doc='Where the keys are: "file:PATH", "env:NAME" or "call:MODULE:FUNCTION", with "ID=" in front; '
        "the first one encrypts, all of them decrypt.",
    )
    inner: str = option(
        "planes",
        doc='Codec that shortens blocks before they are encrypted, "none" for none; '
        "blocks that it does not support go through zstd.",
    )

    def __post_init__(self) -> None:
        """Check what is written as no source.

        Raises:
            ConfigError: One is malformed; it is not shown, because somebody may have written the key itself.
        """
        if not all(is_source(text) for text in self.keys):
            msg = f'{KEYS_OPTION}: a source is malformed; expected "file:PATH", "env:NAME" or "call:MODULE:FUNCTION"'
            raise ConfigError(msg)

    @functools.cached_property
    def keyring(self) -> Keyring:
        """The keys, fetched once per config: every thread has the same ones, whatever a source says later.

        Raises:
            ConfigError: No key is configured, or a source gives none.
        """
        return Keyring.read(self.keys, KEYS_OPTION)
