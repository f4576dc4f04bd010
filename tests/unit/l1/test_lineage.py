from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.l1.entry import Entry
from kvstore.l1.lineage import Lineage

N = 8


@settings(max_examples=200, deadline=None)
@given(
    parents=st.lists(st.one_of(st.none(), st.integers(0, N - 1)), min_size=N, max_size=N),
    flips=st.lists(st.integers(0, N - 1), max_size=60),
)
def test_orphans_are_counted_like_a_full_scan_counts_them(parents: list[int | None], flips: list[int]) -> None:
    """Any parent of any block, in any order of coming and going."""
    index: dict[bytes, Entry] = {}
    lineage = Lineage(index)
    left: set[int] = set()  # parents that left children behind

    def children(i: int) -> int:
        return sum(1 for d in index if parents[d[0]] == i)

    for i in flips:
        digest = bytes([i])
        parent = parents[i]
        if digest in index:
            had_children = children(i) > 0
            entry = index.pop(digest)
            lineage.removed(entry)
            left |= {i} if had_children else set()
        else:
            entry = index[digest] = Entry(digest, 0, None if parent is None else bytes([parent]))
            lineage.added(entry)
            left.discard(i)
        left = {p for p in left if children(p) > 0}

        assert lineage.orphans == sum(1 for d in index if parents[d[0]] in left)
        for d, resident in index.items():
            assert resident.children == children(d[0])

    while index:
        lineage.removed(index.pop(next(iter(index))))
    assert lineage.orphans == 0
    assert not lineage._absent
    assert not lineage._left
