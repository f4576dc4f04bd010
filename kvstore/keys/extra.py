"""Per-block content that token ids do not tell apart, such as images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import KeyMismatchError
from kvstore.keys.digest import check_int, encode_value

_MAX_POSITION = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class BlockExtra:
    """Content that one block depends on besides its token ids.

    Every picture is the same placeholder tokens, so its block needs the picture's hash in the key.
    Give one ``BlockExtra`` for each block that a piece of content overlaps; later blocks commit to
    it through the chain.

    Args:
        block: Number of the block in the whole sequence, 0 based, prefix included.
        value: Content id, never shortened: ``bytes`` (a digest), ``str`` or ``int``; the three
            types are never equal to one another.
        offset: Tokens from the block's first token to the content's first token, negative when it
            began in an earlier block.  Needed where two contents meet without a token between
            them: otherwise ``AAAB`` and ``ABBB`` are one key.

    Raises:
        TypeError: A value is of another type.
        ValueError: ``block`` is out of range.

    Example:
        >>> BlockExtra(block=3, value="sha256:9f86d0", offset=5)
        BlockExtra(block=3, value='sha256:9f86d0', offset=5)
    """

    block: int
    value: bytes | str | int
    offset: int = 0

    def __post_init__(self) -> None:
        check_int("BlockExtra.block", self.block, 0, _MAX_POSITION)
        check_int("BlockExtra.offset", self.offset, -_MAX_POSITION, _MAX_POSITION)
        if self.value is None:
            raise TypeError("BlockExtra.value is None; a block whose content is unknown has no key")
        if isinstance(self.value, (bytearray, memoryview)):
            object.__setattr__(self, "value", bytes(self.value))
        encode_value(self.value)

    def encode(self) -> bytes:
        """The bytes that a block's digest takes in for this content."""
        return encode_value(self.offset) + encode_value(self.value)


def extras_by_block(extra: Sequence[BlockExtra], first_block: int, n_blocks: int) -> dict[int, bytes]:
    """Encode extras for the blocks of a chain, in the order given within each block.

    Args:
        extra: Extras with absolute block numbers.
        first_block: Absolute number of the chain's first block.
        n_blocks: Blocks of the chain, an incomplete last one included.

    Returns:
        Encoded extras by block number relative to ``first_block``.

    Raises:
        TypeError: An item is no :class:`BlockExtra`.
        KeyMismatchError: An extra belongs to a prefix key, whose digests are already made.
        ValueError: An extra lies behind the last block.
    """
    encoded: dict[int, bytes] = {}
    for index, item in enumerate(extra):
        if not isinstance(item, BlockExtra):
            raise TypeError(f"extra {index} is of type {type(item).__name__}; expected BlockExtra")
        number = item.block - first_block
        if number < 0:
            raise KeyMismatchError(
                f"extra {index} belongs to block {item.block}, but the prefix key ends before block {first_block} "
                "and its digests are made; give that extra where the prefix key is made"
            )
        if number >= n_blocks:
            raise ValueError(
                f"extra {index} belongs to block {item.block}, behind the key's last block; "
                f"expected below {first_block + n_blocks}"
            )
        encoded[number] = encoded.get(number, b"") + item.encode()
    return encoded
