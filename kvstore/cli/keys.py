"""The secret keys that a config names for authenticated records."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.config import Config
    from kvstore.keyring import Keyring


def record_keys(config: Config) -> Keyring | None:
    """Fetch the keys that records must be made with; None when the config asks for none.

    Raises:
        ConfigError: A key is not available.
    """
    from kvstore.keyring import Keyring

    sources = config.defaults.record_keys
    return Keyring.read(sources, "defaults.record_keys") if sources else None
