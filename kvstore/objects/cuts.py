"""How a sequence of blocks is cut into packs, and which packs may hold a block: pure arithmetic.

Packs cover ``[p, p + s)`` where ``s`` is a power of two and divides ``p``.  So the pack of a block
ends at one of ``log2(pack_blocks) + 1`` positions, whoever wrote it and wherever the sequence was
cut at the time.
"""

from __future__ import annotations


def cut(start: int, stop: int, pack_blocks: int) -> list[tuple[int, int]]:
    """Cut positions ``[start, stop)`` into the fewest aligned packs, in order."""
    pieces = []
    while start < stop:
        blocks = pack_blocks if start == 0 else min(pack_blocks, start & -start)
        while start + blocks > stop:
            blocks //= 2
        pieces.append((start, start + blocks))
        start += blocks
    return pieces


def group_of(position: int, pack_blocks: int) -> tuple[int, int]:
    """The largest pack's positions ``[start, stop)`` around a block."""
    start = position - position % pack_blocks
    return start, start + pack_blocks


def ends_for(position: int, pack_blocks: int) -> list[int]:
    """Positions at which a pack that holds the block may end, smallest pack first, each once."""
    ends: list[int] = []
    blocks = 1
    while blocks <= pack_blocks:
        end = position - position % blocks + blocks - 1
        if not ends or ends[-1] != end:
            ends.append(end)
        blocks *= 2
    return ends
