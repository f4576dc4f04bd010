"""Why a demo cannot start, or stopped."""

from __future__ import annotations

from kvstore.errors import ConfigError, KVStoreError


class DemoError(KVStoreError):
    """A process of the demo failed; the message holds the end of what it wrote."""


class DemoSetupError(DemoError, ConfigError):
    """Something the demo needs is missing or in the way; the message says what to do."""
