"""The byte format of digests: how values are framed, where chains start, how they go on.

Everything here is part of the stored format (``docs/reference/keys.md`` documents it byte for byte
and golden vectors pin it): a change makes every stored block unreachable, so it needs a new
:data:`KEY_SCHEME_VERSION`.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from struct import iter_unpack
from typing import Any, Final

KEY_SCHEME_VERSION: Final = 1
"""Version of everything in this module; mixed into every chain and every namespace."""

TOKENS: Final = 1
"""Kind of keys made from token ids; also the kind byte of stored names."""

BLOCK_HASHES: Final = 2
"""Kind of keys made from an engine's block hashes; also the kind byte of stored names."""

DIGEST_BYTES: Final = 32

TOKEN_ID_BYTES: Final = 4

MAX_BLOCK_TOKENS: Final = (1 << 31) - 1

_MAX_GROUP: Final = (1 << 32) - 1  # records store the group as u32


def _tag(name: str) -> bytes:
    # 16 bytes: tag + digest + 16 tokens then fill exactly two SHA-256 compressions.
    return name.encode().ljust(16, b"\0")


_SEED: Final = _tag("kvstore/seed")
_TOKEN_BLOCK: Final = _tag("kvstore/tokens")
_TOKEN_BLOCK_EXTRA: Final = _tag("kvstore/tokens+x")
_HASH_CHAINED: Final = _tag("kvstore/hashes")
_HASH_ALONE: Final = _tag("kvstore/alone")
_COARSE: Final = _tag("kvstore/coarse")

_ABSENT, _BYTES, _STR, _INT = b"\0", b"\1", b"\2", b"\3"


def encode_value(value: bytes | bytearray | memoryview | str | int | None) -> bytes:
    """Frame a value as type, length and payload, so that no two values or lists of values collide.

    Bytes-like values of equal content are one value; ``b"1"``, ``"1"`` and ``1`` are three.  Text
    is UTF-8 without normalisation; integers of any size and sign are two's complement.

    Returns:
        ``type u8 ‖ length u64le ‖ payload``.

    Raises:
        TypeError: The value is of another type, a bool or an Enum member (whose text would depend
            on how it is printed).
    """
    # Exact types first: isinstance(value, Enum) alone costs as much as the rest.
    if type(value) is not str and type(value) is not bytes:
        if isinstance(value, (bool, Enum)):
            raise TypeError(f"{value!r} is {_described(value)}; expected bytes, str or int")
        if isinstance(value, (bytearray, memoryview)):
            value = bytes(value)
    if isinstance(value, bytes):
        return _BYTES + len(value).to_bytes(8, "little") + value
    if isinstance(value, str):
        # Lone surrogates (undecodable file names) are kept; "surrogatepass" never maps two texts to one.
        payload = value.encode("utf-8", "surrogatepass")
        return _STR + len(payload).to_bytes(8, "little") + payload
    if value is None:
        return _ABSENT + bytes(8)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{value!r} is {_described(value)}; expected bytes, str or int") from None
    n_bytes = number.bit_length() // 8 + 1
    return _INT + n_bytes.to_bytes(8, "little") + number.to_bytes(n_bytes, "little", signed=True)


def _described(value: object) -> str:
    kind = "an Enum member of type" if isinstance(value, Enum) else "of type"
    return f"{kind} {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class KeyScope:
    """Everything besides its blocks that a chain of digests commits to.

    Attributes:
        kind: :data:`TOKENS` or :data:`BLOCK_HASHES`.
        block_tokens: Tokens per block, 1 to 2**31 - 1.
        salt: Isolates a tenant; ``None`` shares.  Not shown in ``repr``: it may be a secret.
        adapter: Name and revision of a weight adapter; ``None`` is the base model.
        group: KV group of hybrid models, 0 to 2**32 - 1.
        stands_alone: Block hashes that already commit to their prefix.
        seed: 32-byte digest of all of these; where the chain starts.
    """

    kind: int
    block_tokens: int
    salt: bytes | str | None = field(default=None, repr=False)
    adapter: str | None = None
    group: int = 0
    stands_alone: bool = False
    seed: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("block_tokens", self.block_tokens, 1, MAX_BLOCK_TOKENS)
        check_int("group", self.group, 0, _MAX_GROUP)
        if isinstance(self.salt, (bytearray, memoryview)):
            object.__setattr__(self, "salt", bytes(self.salt))
        _check_name("salt", self.salt, (bytes, str))
        _check_name("adapter", self.adapter, (str,))
        fields = (
            KEY_SCHEME_VERSION,
            self.kind,
            int(self.stands_alone),
            self.block_tokens,
            self.group,
            self.salt,
            self.adapter,
        )
        object.__setattr__(self, "seed", hashlib.sha256(_SEED + b"".join(map(encode_value, fields))).digest())


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise unless ``value`` is a true integer from ``low`` to ``high``.

    Raises:
        TypeError: It is not an int, or is a bool or an Enum member.
        ValueError: It is out of range.
    """
    if not isinstance(value, int) or isinstance(value, (bool, Enum)):
        raise TypeError(f"{name} is {value!r}; expected an integer from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected {low} to {high}")


def _check_name(name: str, value: object, types: tuple[type, ...]) -> None:
    if value is None:
        return
    expected = " or ".join(t.__name__ for t in types)
    if not isinstance(value, types) or isinstance(value, Enum):
        raise TypeError(f"{name} is of type {type(value).__name__}; expected {expected}, or None for none")
    if not value:
        raise ValueError(f"{name} is empty; pass a non-empty {expected}, or None for none")


def chain_tokens(previous: bytes, ids: memoryview, block_tokens: int, extras: Mapping[int, bytes]) -> tuple[bytes, ...]:
    """Digest the whole blocks of ``ids``, each committing to all before it.

    Args:
        previous: Digest that the first block follows: the block before it, or the scope's seed.
        ids: Token ids as u32 little-endian bytes; an incomplete last block is left out.
        block_tokens: Tokens per block.
        extras: Encoded extras by block number within ``ids``; blocks without any are left out.

    Returns:
        One 32-byte digest per whole block.
    """
    block_bytes = block_tokens * TOKEN_ID_BYTES
    whole = ids[: len(ids) // block_bytes * block_bytes]
    # Copying a context that has read the tag is faster than making one per block.
    plain = hashlib.sha256(_TOKEN_BLOCK).copy
    with_extra = hashlib.sha256(_TOKEN_BLOCK_EXTRA).copy
    digests = []
    if not extras:
        for (block,) in iter_unpack(f"{block_bytes}s", whole):
            h = plain()
            h.update(previous)
            h.update(block)
            previous = h.digest()
            digests.append(previous)
        return tuple(digests)
    for number, (block,) in enumerate(iter_unpack(f"{block_bytes}s", whole)):
        extra = extras.get(number)
        h = plain() if extra is None else with_extra()
        h.update(previous)
        h.update(block)
        if extra is not None:
            h.update(extra)
        previous = h.digest()
        digests.append(previous)
    return tuple(digests)


def chain_hashes(previous: bytes, hashes: Iterable[Any]) -> tuple[bytes, ...]:
    """Digest block hashes that name content only, each committing to all before it.

    Args:
        previous: Digest that the first hash follows: the block before it, or the scope's seed.
        hashes: Values that :func:`encode_value` accepts, ``None`` excepted.

    Raises:
        TypeError: A hash is of another type; the message names its index.
    """
    fresh = hashlib.sha256(_HASH_CHAINED).copy
    digests = []
    for encoded in _encoded_hashes(hashes):
        h = fresh()
        h.update(previous)
        h.update(encoded)
        previous = h.digest()
        digests.append(previous)
    return tuple(digests)


def stand_alone_hashes(seed: bytes, hashes: Iterable[Any]) -> tuple[bytes, ...]:
    """Digest block hashes that already commit to their prefix, each for itself.

    Raises:
        TypeError: A hash is of another type; the message names its index.
    """
    fresh = hashlib.sha256(_HASH_ALONE + seed).copy
    digests = []
    for encoded in _encoded_hashes(hashes):
        h = fresh()
        h.update(encoded)
        digests.append(h.digest())
    return tuple(digests)


def _encoded_hashes(hashes: Iterable[Any]) -> Iterable[bytes]:
    values = hashes if isinstance(hashes, (list, tuple)) else list(hashes)
    # Engines give texts or bytes of one length: one frame for all takes a third of the time.
    kinds = set(map(type, values))
    if kinds == {bytes} and len(lengths := set(map(len, values))) == 1:
        frame = _BYTES + lengths.pop().to_bytes(8, "little")
        return [frame + value for value in values]
    if kinds == {str} and len(lengths := set(map(len, values))) == 1 and all(map(str.isascii, values)):
        frame = _STR + lengths.pop().to_bytes(8, "little")
        return [frame + value.encode() for value in values]
    return map(_encoded_hash, values, range(len(values)))


def _encoded_hash(value: Any, index: int) -> bytes:
    if value is None:
        raise TypeError(f"block hash {index} is None; expected bytes, str or int")
    try:
        return encode_value(value)
    except TypeError as e:
        raise TypeError(f"block hash {index}: {e}") from None


def coarse_digest(digest: bytes, factor: int) -> bytes:
    """Name a block of ``factor`` blocks by the digest of its last one, under a tag of its own."""
    return hashlib.sha256(_COARSE + encode_value(factor) + digest).digest()
