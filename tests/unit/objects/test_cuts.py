"""The arithmetic of packs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.objects.cuts import cut, ends_for, group_of

PACKS = st.sampled_from([1, 2, 4, 16, 64])


@given(st.integers(0, 500), st.integers(0, 200), PACKS)
def test_pieces_are_aligned_powers_of_two_that_cover_the_run(start: int, n: int, pack_blocks: int) -> None:
    pieces = cut(start, start + n, pack_blocks)
    assert [p for a, b in pieces for p in range(a, b)] == list(range(start, start + n))
    for a, b in pieces:
        blocks = b - a
        assert blocks & (blocks - 1) == 0
        assert blocks <= pack_blocks
        assert a % blocks == 0
        assert group_of(a, pack_blocks) == group_of(b - 1, pack_blocks)


@given(st.integers(0, 500), st.integers(1, 200), PACKS)
def test_a_block_is_in_a_pack_that_ends_where_it_is_looked_for(start: int, n: int, pack_blocks: int) -> None:
    for a, b in cut(start, start + n, pack_blocks):
        for position in range(a, b):
            assert b - 1 in ends_for(position, pack_blocks)
            assert len(ends_for(position, pack_blocks)) <= pack_blocks.bit_length()


def test_a_long_prompt_in_one_go_is_whole_packs_and_a_binary_tail() -> None:
    assert cut(0, 27, 16) == [(0, 16), (16, 24), (24, 26), (26, 27)]
    assert cut(21, 40, 16) == [(21, 22), (22, 24), (24, 32), (32, 40)]
    assert len(cut(0, 2048, 16)) == 128
