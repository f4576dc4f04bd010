"""Keys of both kinds: token ids, and an engine's own block hashes."""

from __future__ import annotations

from kvstore.keys.digest import KEY_SCHEME_VERSION
from kvstore.keys.extra import BlockExtra
from kvstore.keys.key import BlockHashKey, KVCacheKey, TokenKey

__all__ = ["KEY_SCHEME_VERSION", "BlockExtra", "BlockHashKey", "KVCacheKey", "TokenKey"]
