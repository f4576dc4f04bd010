"""Which blocks ``kvstore explain`` is asked about: one digest, the token ids of a prompt, or an engine's hashes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvstore.errors import ConfigError, KeyMismatchError
from kvstore.keys import KVCacheKey
from kvstore.other_namespaces import Sought

DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}\Z")
"""A block's digest as ``kvstore ls --json`` shows it."""

HASH_TYPES: Final = ("bytes", "text", "int")
_KINDS: Final = (1, 2)
_MAX_BYTES: Final = 256 << 20  # a prompt of 10 million tokens has 70 MB of text


@dataclass(frozen=True, slots=True)
class Asked:
    """Blocks to look for.

    Attributes:
        digests: In the order of the prompt.
        kinds: Kinds of key to try; one unless only a digest is known.
        start: Index of the first block in its sequence; -1 when that is not known.
    """

    digests: Sequence[bytes]
    kinds: Sequence[int]
    start: int

    def sought(self, kind: int) -> Sought:
        """The blocks, taken for those of one kind of key."""
        return Sought(self.digests, kind, self.start)


@dataclass(frozen=True, slots=True)
class Question:
    """What somebody wants explained, before it is known how long a block is.

    Attributes:
        digest: One block; None when there is a prompt.
        tokens: Token ids of a prompt.
        hashes: An engine's block hashes.
        chained: Whether each hash commits to what is before it.
        salt: Of the keys.
        adapter: Of the keys.
        group: Of the keys.
    """

    digest: bytes | None = None
    tokens: Sequence[int] | None = None
    hashes: Sequence[bytes | int | str] | None = None
    chained: bool = True
    salt: str | None = None
    adapter: str | None = None
    group: int | None = None

    @classmethod
    def by(cls, args: argparse.Namespace, digest: str | None) -> Question:
        """Read the arguments and the files that they name.

        Raises:
            ConfigError: Not exactly one thing is asked for, or a file holds something else.
        """
        given = [digest is not None, args.tokens is not None, args.hashes is not None]
        if sum(given) != 1:
            msg = f"{'nothing' if not any(given) else 'several things'} to explain: give one of KEY, --tokens, --hashes"
            raise ConfigError(msg)
        scope: dict[str, Any] = {"salt": args.salt, "adapter": args.adapter, "group": args.group}
        if digest is not None:
            if any(value is not None for value in scope.values()):
                msg = "--salt, --adapter and --group are in a digest already; they go with --tokens or --hashes"
                raise ConfigError(msg)
            return cls(digest=bytes.fromhex(digest))
        if args.tokens is not None:
            return cls(tokens=_numbers(args.tokens), **scope)
        return cls(hashes=_hashes(args.hashes, args.hash_type), chained=not args.unchained, **scope)

    def asked(self, block_tokens: int) -> Asked:
        """Make the key.

        Raises:
            ConfigError: It cannot be made of these values; the message says which.
        """
        if self.digest is not None:
            return Asked((self.digest,), _KINDS, -1)
        scope: dict[str, Any] = {"salt": self.salt, "adapter": self.adapter, "group": self.group}
        try:
            if self.tokens is not None:
                key: KVCacheKey = KVCacheKey.from_tokens(self.tokens, block_tokens=block_tokens, **scope)
            else:
                key = KVCacheKey.from_block_hashes(
                    self.hashes or (), block_tokens=block_tokens, chained=self.chained, **scope
                )
        except (ValueError, TypeError, KeyMismatchError) as e:
            msg = f"no key can be made of that: {e}"
            raise ConfigError(msg) from e
        return Asked(key.digests, (key.kind,), key.start_block if key.position_known else -1)

    def variants(self) -> Iterator[tuple[str, Question]]:
        """The same prompt without its salt or adapter, which a writer may have lacked."""
        if self.salt is not None:
            yield "without a salt", replace(self, salt=None)
        if self.adapter is not None:
            yield "without an adapter", replace(self, adapter=None)
        if self.salt is not None and self.adapter is not None:
            yield "without salt and adapter", replace(self, salt=None, adapter=None)
        if self.group:
            yield "in group 0", replace(self, group=None)


def _text(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read(_MAX_BYTES)
        with Path(name).expanduser().open(encoding="utf-8") as file:
            return file.read(_MAX_BYTES)
    except (OSError, UnicodeDecodeError) as e:
        msg = f"{name} cannot be read: {e}"
        raise ConfigError(msg) from e


def _items(name: str) -> list[Any]:
    """A JSON list, or words between spaces, commas and line ends."""
    text = _text(name)
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except (ValueError, RecursionError) as e:
            msg = f"{name} begins like a JSON list and is none: {e}"
            raise ConfigError(msg) from e
        return list(items)
    return [word for word in re.split(r"[\s,]+", text) if word]


def _numbers(name: str) -> list[int]:
    numbers = []
    for i, item in enumerate(_items(name)):
        if isinstance(item, str) and item.isdecimal():
            numbers.append(int(item))
        elif isinstance(item, int) and not isinstance(item, bool):
            numbers.append(item)
        else:
            msg = f"{name}: item {i} is {item!r:.40}, no token id; expected a JSON list of numbers, or numbers as text"
            raise ConfigError(msg)
    return numbers


def _hashes(name: str, kind: str) -> list[bytes | int | str]:
    hashes: list[bytes | int | str] = []
    for i, item in enumerate(_items(name)):
        try:
            if kind == "int":
                hashes.append(int(item))
            elif kind == "text" and isinstance(item, str):
                hashes.append(item)
            else:
                hashes.append(bytes.fromhex(item))
        except (ValueError, TypeError) as e:
            expected = "a whole number" if kind == "int" else "hexadecimal digits in quotes, or as text"
            msg = f"{name}: item {i} is {item!r:.40}; for --hash-type {kind} {expected} is expected"
            raise ConfigError(msg) from e
    return hashes
