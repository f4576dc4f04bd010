"""Why a demo cannot run at all."""

from __future__ import annotations

from kvstore.errors import KVStoreError


class DemoError(KVStoreError):
    """Something the demo needs is missing or failed; the message says what to do."""
