"""Token keys: prefix and query, continuing a key, extras, tails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KeyMismatchError
from kvstore.keys import BlockExtra, BlockHashKey, KVCacheKey, TokenKey

ids = st.lists(st.integers(0, 50), max_size=40)


def key(query: Any, *, block_tokens: int = 4, **arguments: Any) -> TokenKey:
    return KVCacheKey.from_tokens(query, block_tokens=block_tokens, **arguments)


def test_key_counts_whole_blocks_and_its_tail() -> None:
    k = key(range(10))

    assert type(k) is TokenKey
    assert (len(k), k.n_tokens, k.n_tail_tokens, k.block_tokens, k.kind) == (2, 8, 2, 4, 1)
    assert (k.parent, k.start_block, k.position_known, k.group, k.salt, k.adapter) == (None, 0, True, 0, None, None)
    assert memoryview(k.tokens).cast("I").tolist() == list(range(8))
    assert memoryview(k.tail_tokens).cast("I").tolist() == [8, 9]
    assert k.tokens.readonly
    assert all(len(d) == 32 for d in k.digests)


@pytest.mark.parametrize("n", [0, 1, 15])
def test_less_than_a_block_addresses_nothing(n: int) -> None:
    k = key(range(n), block_tokens=16)

    assert (len(k), k.n_tokens, k.n_tail_tokens, k.digests) == (0, 0, n, ())


@given(ids, ids, st.integers(1, 6))
def test_query_with_prefix_is_the_suffix_of_the_whole(p: list[int], q: list[int], block_tokens: int) -> None:
    p = p[: len(p) // block_tokens * block_tokens]
    whole = key(p + q, block_tokens=block_tokens)
    expected = whole.suffix(len(p) // block_tokens)

    for prefix in (p, key(p, block_tokens=block_tokens)):
        part = key(q, block_tokens=block_tokens, prefix=prefix)

        assert part == expected
        assert part.digests == expected.digests
        assert (part.parent, part.start_block) == (expected.parent, expected.start_block)
        assert (bytes(part.tokens), bytes(part.tail_tokens)) == (bytes(expected.tokens), bytes(expected.tail_tokens))


@given(ids, ids)
def test_keys_are_equal_when_their_whole_blocks_are(a: list[int], b: list[int]) -> None:
    same = a[: len(a) // 4 * 4] == b[: len(b) // 4 * 4]

    assert (key(a) == key(b)) == same
    assert not same or hash(key(a)) == hash(key(b))


def test_key_can_be_continued_turn_by_turn() -> None:
    k = key(range(8))
    for start in range(8, 40, 8):
        k = key(range(start, start + 8), prefix=k)

    assert k == key(range(40)).suffix(8)
    assert k.start_block == 8


def test_empty_key_keeps_its_place() -> None:
    end = key(range(8)).suffix(2)

    assert len(end) == 0
    assert end.parent == key(range(8)).digests[1]
    assert end != key([])
    assert key(range(8, 12), prefix=end) == key(range(12)).suffix(2)


def test_prefix_key_passes_on_salt_adapter_and_group() -> None:
    names: dict[str, Any] = {"salt": "t", "adapter": "lora@1", "group": 2}
    prefix = key(range(8), **names)
    expected = key(range(12), **names).suffix(2)

    assert key(range(8, 12), prefix=prefix) == key(range(8, 12), prefix=prefix, **names) == expected
    assert (expected.salt, expected.adapter, expected.group) == ("t", "lora@1", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"salt": "other"}, "^salt differs from the prefix key's$"),
        ({"salt": b"t"}, "^salt differs from the prefix key's$"),
        ({"adapter": "lora@2"}, "adapter differs from the prefix key's: 'lora@2' instead of 'lora@1'"),
        ({"group": 0}, "group differs from the prefix key's: 0 instead of 2"),
        ({"block_tokens": 2}, "block_tokens differs from the prefix key's: 2 instead of 4"),
    ],
)
def test_prefix_key_of_another_identity_is_refused(change: dict[str, Any], message: str) -> None:
    prefix = key(range(8), salt="t", adapter="lora@1", group=2)

    with pytest.raises(KeyMismatchError, match=message):
        key(range(4), prefix=prefix, **change)


def test_prefix_that_is_no_whole_blocks_is_refused() -> None:
    message = "has 10 tokens, 2 blocks of 4 and 2 more; expected whole blocks: give the last 2 with the query"

    with pytest.raises(KeyMismatchError, match=f"^prefix {message}"):
        key([1], prefix=range(10))
    with pytest.raises(KeyMismatchError, match=f"^prefix key {message}"):
        key([1], prefix=key(range(10)))
    assert key(range(8, 12), prefix=key(range(10)).prefix(2)) == key(range(12)).suffix(2)


def test_prefix_key_of_the_other_kind_is_refused() -> None:
    hashes: BlockHashKey = KVCacheKey.from_block_hashes([b"a"], block_tokens=4, chained=True)

    with pytest.raises(KeyMismatchError, match="prefix is a block-hash key; expected a token key"):
        key([1], prefix=hashes)


def test_coarse_prefix_key_is_refused() -> None:
    with pytest.raises(KeyMismatchError, match="prefix is a coarse key, which cannot be continued"):
        key([1], prefix=key(range(8)).coarsen(2), block_tokens=8)


def test_extra_changes_its_block_and_all_later_ones() -> None:
    plain, image = key(range(16)), key(range(16), extra=[BlockExtra(1, b"cat")])

    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False]
    assert image == key(range(16), extra=[BlockExtra(1, b"cat")])
    assert image != key(range(16), extra=[BlockExtra(1, b"dog")])
    assert image != key(range(16), extra=[BlockExtra(2, b"cat")])


def test_extras_count_blocks_of_the_whole_sequence() -> None:
    extra = [BlockExtra(0, b"cat"), BlockExtra(2, b"dog"), BlockExtra(2, b"cow", offset=2)]
    whole = key(range(16), extra=extra)

    assert key(range(8, 16), prefix=range(8), extra=extra) == whole.suffix(2)
    assert key(range(8, 16), prefix=key(range(8), extra=extra[:1]), extra=extra[1:]) == whole.suffix(2)


def test_extra_of_a_prefix_key_block_is_refused() -> None:
    with pytest.raises(KeyMismatchError, match="extra 0 belongs to block 1, but the prefix key ends before block 2"):
        key(range(8), prefix=key(range(8)), extra=[BlockExtra(1, b"cat")])


def test_extra_of_the_tail_is_allowed_and_extra_behind_it_is_refused() -> None:
    assert key(range(10), extra=[BlockExtra(2, b"cat")]) == key(range(10))
    with pytest.raises(ValueError, match="extra 0 belongs to block 3, behind the key's last block; expected below 3"):
        key(range(10), extra=[BlockExtra(3, b"cat")])


@pytest.mark.parametrize("item", [None, b"cat", ("cat", 1), {"block": 0}])
def test_extra_of_another_type_is_refused(item: Any) -> None:
    with pytest.raises(TypeError, match=r"extra 0 is of type .*; expected BlockExtra"):
        key(range(8), extra=[item])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, b"a"), ValueError, "BlockExtra.block is -1"),
        ((True, b"a"), TypeError, "BlockExtra.block is True"),
        ((0, None), TypeError, "BlockExtra.value is None; a block whose content is unknown has no key"),
        ((0, 1.5), TypeError, "1.5 is of type float; expected bytes, str or int"),
        ((0, b"a", 1.5), TypeError, r"BlockExtra.offset is 1.5"),
    ],
)
def test_extra_refuses_what_it_cannot_name(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockExtra(*arguments)


def test_extra_keeps_its_own_copy_of_a_buffer() -> None:
    buffer = bytearray(b"cat")
    extra = BlockExtra(0, buffer)  # type: ignore[arg-type]  # bytes-like all the same
    buffer[:] = b"dog"

    assert extra == BlockExtra(0, b"cat")
    assert hash(extra) == hash(BlockExtra(0, b"cat"))


def test_key_does_not_change_with_the_callers_array() -> None:
    np = pytest.importorskip("numpy")
    query = np.arange(8, dtype=np.uint32)
    k = key(query)
    query[:] = 0

    assert memoryview(k.tokens).cast("I").tolist() == list(range(8))
