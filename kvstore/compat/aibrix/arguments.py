"""The two ways to call: ``(prefix, query[, kv_tensors])`` or ``(cache_key[, kv_tensors])``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.compat.aibrix.handles import KVCacheHandle
from kvstore.compat.aibrix.views import KVCacheKey, KVCacheKeyTypes, check_pair

_BY_PAIR: Final = ("prefix", "query")
_BY_KEY: Final = ("cache_key",)


@dataclass(frozen=True, slots=True)
class Arguments:
    """One call's arguments.

    Attributes:
        prefix: What precedes the query.
        query: What the call is about.
        handle: Blocks to read from or write to; only with calls that take one.
    """

    prefix: KVCacheKeyTypes | None
    query: KVCacheKeyTypes
    handle: KVCacheHandle | None = None


def normalise(args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_handle: bool = False) -> Arguments:
    """Bring a call into one form; every argument is used or refused.

    The prefix may be None but not left out: blocks would be stored under another key.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        takes_handle: Whether the call needs ``kv_tensors``.

    Raises:
        TypeError: An argument is missing, given twice, unknown or of another type.
        ValueError: Prefix and query have different block sizes.
    """
    by_key = "cache_key" in kwargs or bool(args and isinstance(args[0], KVCacheKey))
    names = (_BY_KEY if by_key else _BY_PAIR) + (("kv_tensors",) if takes_handle else ())
    values = dict(zip(names, args, strict=False))
    twice = values.keys() & kwargs.keys()
    values |= kwargs
    if len(args) > len(names) or twice or values.keys() != set(names):
        got = ", ".join([*(type(arg).__name__ for arg in args), *(f"{name}=" for name in kwargs)])
        wanted = f"(cache_key{', kv_tensors' * takes_handle}) or (prefix, query{', kv_tensors' * takes_handle})"
        msg = f"called with ({got}); expected {wanted}, each once"
        raise TypeError(msg)
    handle = values.get("kv_tensors")
    if takes_handle and not isinstance(handle, KVCacheHandle):
        msg = f"kv_tensors is of type {type(handle).__name__}; expected a KVCacheHandle"
        raise TypeError(msg)
    if not by_key:
        check_pair(values["prefix"], values["query"])
        return Arguments(values["prefix"], values["query"], handle)
    key = values["cache_key"]
    if not isinstance(key, KVCacheKey):
        msg = f"cache_key is of type {type(key).__name__}; expected a KVCacheKey"
        raise TypeError(msg)
    return Arguments(key.prefix, key.query, handle)
