"""Keys: which KV blocks a call is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, Self, TypeAlias

from kvstore.errors import KeyMismatchError
from kvstore.keys.digest import (
    BLOCK_HASHES,
    TOKEN_ID_BYTES,
    TOKENS,
    KeyScope,
    chain_hashes,
    chain_tokens,
    stand_alone_hashes,
)
from kvstore.keys.extra import BlockExtra, extras_by_block
from kvstore.keys.run import DigestRun, Span
from kvstore.keys.token_ids import TokenIds, token_bytes

BlockHash: TypeAlias = bytes | int | str

_KIND_NAMES: Final = {TOKENS: "token", BLOCK_HASHES: "block-hash"}


class KVCacheKey(DigestRun):
    """Names a run of consecutive KV blocks; what every cache call takes.

    Make one with :meth:`from_tokens` or :meth:`from_block_hashes`.  Keys are immutable, hashable,
    picklable and safe to share between threads.  Their digests are SHA-256 over a documented byte
    format: the same in every process, on every host and in every Python version.

    Example:
        >>> key = KVCacheKey.from_tokens(range(40), block_tokens=16)
        >>> len(key), key.n_tokens, key.n_tail_tokens
        (2, 32, 8)
        >>> known, new = key.split(1)
        >>> new == KVCacheKey.from_tokens(range(16, 40), block_tokens=16, prefix=range(16))
        True
    """

    __slots__ = ()

    @classmethod
    def from_tokens(  # noqa: PLR0913 - the public contract: each is an identity of its own
        cls,
        query: TokenIds,
        *,
        block_tokens: int,
        prefix: TokenIds | KVCacheKey | None = None,
        salt: bytes | str | None = None,
        adapter: str | None = None,
        extra: Sequence[BlockExtra] = (),
        group: int | None = None,
    ) -> TokenKey:
        """Make a key from token ids; each block's digest commits to all tokens before it.

        The key addresses the whole blocks of ``query``; a last block that is not full is counted
        in ``n_tail_tokens`` and cannot be stored.  ``from_tokens(q, prefix=p)`` equals
        ``from_tokens(p + q).suffix(blocks of p)``.  With a key as ``prefix``, only the new tokens
        are hashed.

        Args:
            query: Token ids in ``[0, 2**32)``: list, tuple, range or one-dimensional integer array
                (numpy, torch, ...).  Equal values give equal keys, whatever the container.
            block_tokens: Tokens per block, at least 1.
            prefix: What precedes ``query``, in whole blocks: token ids, or a :class:`TokenKey`,
                whose salt, adapter and group hold unless the same are given again.
            salt: Isolates a tenant: no block is shared with another salt.
            adapter: Name **and revision** of a weight adapter; a reload under the same name must
                change it.
            extra: Content besides token ids (images), for each block that it overlaps.
            group: KV group of hybrid models; 0 unless given.

        Raises:
            ValueError: A token is not an integer in range (named with its index), or an argument
                is empty or out of range.
            TypeError: An argument is of another type.
            KeyMismatchError: ``prefix`` is not whole blocks, or is a key that differs in kind,
                block size, salt, adapter or group.
        """
        wanted = {"kind": TOKENS, "block_tokens": block_tokens, "salt": salt, "adapter": adapter, "group": group}
        scope = _scope(prefix, wanted)
        ids = token_bytes(query, "query")
        skip = 0
        if isinstance(prefix, TokenKey):
            if prefix.n_tail_tokens:
                raise _not_whole("prefix key", prefix.n_tokens + prefix.n_tail_tokens, block_tokens)
            span = _span_after(prefix)
        else:
            span = Span(scope)
            before = b"" if prefix is None else token_bytes(prefix, "prefix")
            skip, left_over = divmod(len(before), block_tokens * TOKEN_ID_BYTES)
            if left_over:
                raise _not_whole("prefix", len(before) // TOKEN_ID_BYTES, block_tokens)
            ids = before + ids
        n_blocks = -(-len(ids) // (block_tokens * TOKEN_ID_BYTES))
        extras = extras_by_block(extra, span.start_block, n_blocks)
        view = memoryview(ids)
        return TokenKey(span, chain_tokens(span.head, view, block_tokens, extras), view).suffix(skip)

    @classmethod
    def from_block_hashes(  # noqa: PLR0913 - the public contract: each is an identity of its own
        cls,
        query: Sequence[BlockHash],
        *,
        block_tokens: int,
        chained: bool,
        prefix: Sequence[BlockHash] | KVCacheKey | None = None,
        salt: bytes | str | None = None,
        adapter: str | None = None,
        group: int | None = None,
    ) -> BlockHashKey:
        """Make a key from an engine's own block hashes, one per block.

        With ``chained=True`` each hash already commits to its prefix and stands alone: the digest
        depends on nothing but the hash, and a suffix equals the key of the remaining hashes.  With
        ``chained=False`` a hash names its block's content only, and kvstore chains them: equal
        content behind another prefix is another key.  There is no default: the wrong answer
        returns another prompt's KV.

        Args:
            query: Hashes: ``bytes`` (vLLM), ``str`` (SGLang's hex) or ``int``, of any length or
                size and never shortened.  Equal text, number and bytes are three hashes.
            block_tokens: Tokens per block, at least 1.
            chained: Whether each hash already commits to everything before its block.
            prefix: All hashes that precede ``query``, or a :class:`BlockHashKey`, whose salt,
                adapter and group hold unless the same are given again.  Without it, stand-alone
                hashes may begin anywhere (``position_known`` is false).
            salt: Isolates a tenant: no block is shared with another salt.
            adapter: Name and revision of a weight adapter.
            group: KV group of hybrid models; 0 unless given.

        Raises:
            TypeError: A hash is no bytes, str or int (named with its index), or an argument is of
                another type.
            ValueError: An argument is empty or out of range.
            KeyMismatchError: ``prefix`` is a key that differs in kind, block size, ``chained``,
                salt, adapter or group.
        """
        if not isinstance(chained, bool):
            raise TypeError(f"chained is {chained!r}; expected True (each hash commits to its prefix) or False")
        wanted = {"kind": BLOCK_HASHES, "block_tokens": block_tokens, "salt": salt, "adapter": adapter}
        scope = _scope(prefix, wanted | {"group": group, "stands_alone": chained})
        hashes = _hash_items(query, "query")
        skip = 0
        if isinstance(prefix, BlockHashKey):
            span = _span_after(prefix)
        else:
            span = Span(scope, position_known=prefix is not None or not chained)
            before = [] if prefix is None else _hash_items(prefix, "prefix")
            skip = len(before)
            hashes = [*before, *hashes]
        digests = stand_alone_hashes(scope.seed, hashes) if chained else chain_hashes(span.head, hashes)
        return BlockHashKey(span, digests).suffix(skip)


class TokenKey(KVCacheKey):
    """A key made from token ids; made by :meth:`KVCacheKey.from_tokens`."""

    __slots__ = ("_ids",)

    kind = TOKENS

    def __init__(self, span: Span, digests: tuple[bytes, ...], ids: bytes | memoryview) -> None:
        super().__init__(span, digests)
        self._ids: Final = memoryview(ids)

    @property
    def tokens(self) -> memoryview:
        """Ids of the whole blocks, u32 little-endian, read only: ``n_tokens * 4`` bytes, not copied."""
        return self._ids[: self.n_tokens * TOKEN_ID_BYTES]

    @property
    def tail_tokens(self) -> memoryview:
        """Ids behind the last whole block, u32 little-endian, read only."""
        return self._ids[self.n_tokens * TOKEN_ID_BYTES :]

    @property
    def n_tail_tokens(self) -> int:
        """Tokens behind the last whole block; they are not addressable."""
        return len(self._ids) // TOKEN_ID_BYTES - self.n_tokens

    def _derive(self, span: Span, digests: tuple[bytes, ...], *, first_block: int, keep_tail: bool) -> Self:
        block_bytes = self.block_tokens * TOKEN_ID_BYTES
        first = first_block * block_bytes
        ids = self._ids[first:] if keep_tail else self._ids[first : first + len(digests) * block_bytes]
        return type(self)(span, digests, ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._span, self._digests, bytes(self._ids))


class BlockHashKey(KVCacheKey):
    """A key made from an engine's block hashes; made by :meth:`KVCacheKey.from_block_hashes`."""

    __slots__ = ()

    kind = BLOCK_HASHES

    @property
    def chained(self) -> bool:
        """Whether the engine's hashes already commit to their prefix and stand alone."""
        return self._span.scope.stands_alone

    def _derive(self, span: Span, digests: tuple[bytes, ...], *, first_block: int, keep_tail: bool) -> Self:
        del first_block, keep_tail  # hashes have no tail
        return type(self)(span, digests)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._span, self._digests)


def _scope(prefix: object, wanted: dict[str, Any]) -> KeyScope:
    """Build the scope asked for; what is not said comes from the prefix key, which must agree."""
    if not isinstance(prefix, DigestRun):
        return KeyScope(**wanted | {"group": 0 if wanted["group"] is None else wanted["group"]})
    theirs = prefix._span.scope  # noqa: SLF001 - its own package
    if prefix.kind != wanted["kind"]:
        raise KeyMismatchError(
            f"prefix is a {_KIND_NAMES[prefix.kind]} key; expected a {_KIND_NAMES[wanted['kind']]} key"
        )
    if prefix._span.factor != 1:  # noqa: SLF001
        raise KeyMismatchError(
            "prefix is a coarse key, which cannot be continued; continue the key it was made from and coarsen that"
        )
    scope = KeyScope(**{name: getattr(theirs, name) if value is None else value for name, value in wanted.items()})
    for name in (f.name for f in fields(KeyScope) if f.compare):
        mine, other = getattr(scope, name), getattr(theirs, name)
        if mine != other:
            said = "" if name == "salt" else f": {mine!r} instead of {other!r}"  # a salt may be a secret
            label = "chained" if name == "stands_alone" else name
            raise KeyMismatchError(f"{label} differs from the prefix key's{said}")
    return scope


def _span_after(prefix: DigestRun) -> Span:
    """Where blocks lie that follow ``prefix``."""
    return prefix.suffix(len(prefix))._span  # noqa: SLF001 - its own package


def _not_whole(name: str, n_tokens: int, block_tokens: int) -> KeyMismatchError:
    whole, rest = divmod(n_tokens, block_tokens)
    return KeyMismatchError(
        f"{name} has {n_tokens} tokens, {whole} blocks of {block_tokens} and {rest} more; expected whole blocks: "
        f"give the last {rest} with the query"
    )


def _hash_items(hashes: object, name: str) -> list[Any]:
    if isinstance(hashes, DigestRun):
        raise TypeError(f"{name} is a key already; expected a sequence of block hashes")
    if getattr(getattr(hashes, "dtype", None), "kind", "") in ("S", "U"):
        raise TypeError(
            f"{name} is a numpy array of fixed-width text, which drops trailing NULs of hashes; expected a list"
        )
    items = hashes.tolist() if hasattr(hashes, "tolist") else hashes  # numpy and torch integers
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes, bytearray)):
        raise TypeError(f"{name} is of type {type(hashes).__name__}; expected a sequence of block hashes")
    return list(items)
