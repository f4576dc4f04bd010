"""How far a prefix of a hybrid model can be restored: every pool limits it in its own way.

Plain values in, plain values out; the policies are those of ``PoolHitPolicy`` and the answer is that of
``PoolTransferResult`` in SGLang's ``srt/mem_cache/hicache_storage.py`` (0.5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

ALL_PAGES: Final = "all_pages"
TRAILING_PAGES: Final = "trailing_pages"
BLOCK_GROUPS: Final = "block_groups"


@dataclass(frozen=True, slots=True)
class PoolQuery:
    """What is asked of one pool besides KV.

    Attributes:
        name: The pool.
        policy: One of the policies above; a pool with another one restores nothing.
        keys: Keys that SGLang names; for ``trailing_pages`` only their number counts.
        block_pages: For ``block_groups``: KV pages that one group stands for.
        group_pages: For ``block_groups``: keys of one group.
    """

    name: str
    policy: str
    keys: Sequence[str] = ()
    block_pages: int = 0
    group_pages: int = 0


@dataclass(frozen=True, slots=True)
class Restorable:
    """How much is there.

    Attributes:
        kv_pages: The longest prefix that all pools can restore.
        by_pool: How far each pool gets on its own; pools with nothing are left out.
        lengths: Every length of a prefix that can be restored, ascending.
    """

    kv_pages: int
    by_pool: dict[str, int]
    lengths: list[int]


Count = Callable[[str, Sequence[str]], int]
"""``(pool, keys)``: how many leading keys are stored."""
Each = Callable[[str, Sequence[str]], list[bool]]
"""``(pool, keys)``: which of the keys are stored."""


def restorable(keys: Sequence[str], queries: Sequence[PoolQuery], *, kv: str, count: Count, each: Each) -> Restorable:
    """Intersect what the pools have.

    Args:
        keys: Page keys of the wanted prefix.
        queries: The pools besides KV; each is asked only while something is left to restore.
        kv: Name of the KV pool.
        count: Counts leading keys of a pool.
        each: Says for each key of a pool whether it is stored.
    """
    kv_pages = count(kv, keys)
    by_pool = {kv: kv_pages} if kv_pages else {}
    lengths = list(range(1, kv_pages + 1))
    for query in queries:
        if not lengths:
            break
        if query.policy == BLOCK_GROUPS:
            covered = _covered(query, keys[:kv_pages], count)
            if covered:
                by_pool[query.name] = covered
            continue  # a second form of the KV pages: it says how far it goes and limits nothing
        able = _able(query, keys[:kv_pages], count, each)
        if able:
            by_pool[query.name] = max(able)
        lengths = [n for n in lengths if n in able]
    return Restorable(lengths[-1] if lengths else 0, by_pool, lengths)


def _able(query: PoolQuery, keys: Sequence[str], count: Count, each: Each) -> set[int]:
    """Lengths of a prefix of ``keys`` that a pool can restore."""
    if query.policy == ALL_PAGES:
        return set(range(1, count(query.name, keys) + 1))
    if query.policy != TRAILING_PAGES:
        return set()
    window = max(1, len(query.keys))
    able, run = set(), 0
    for n, there in enumerate(each(query.name, keys), 1):
        run = run + 1 if there else 0
        if run >= min(window, n):
            able.add(n)
    return able


def _covered(query: PoolQuery, keys: Sequence[str], count: Count) -> int:
    """KV pages that the leading whole groups of a pool stand for.

    Without keys of its own a group is named by the last pages of its block.
    """
    block, group = query.block_pages, query.group_pages
    if block < 1 or group < 1:
        return 0
    blocks = range(block, len(keys) + 1, block)
    named = query.keys or [key for end in blocks for key in keys[max(0, end - group) : end]]
    return count(query.name, named) // group * block
