"""Which keys may share blocks: salts, adapters, extras, prefixes, block sizes, groups, kinds."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from kvstore.keys import BlockExtra, KVCacheKey
from kvstore.keys.key import TokenKey

TOKENS = list(range(100, 132))


def tokens(query: Any = TOKENS, **arguments: Any) -> TokenKey:
    return KVCacheKey.from_tokens(query, **{"block_tokens": 16, **arguments})


def hashes(query: Any = ("a", "b"), **arguments: Any) -> KVCacheKey:
    return KVCacheKey.from_block_hashes(query, **{"block_tokens": 16, "chained": True, **arguments})


SCOPES: list[dict[str, Any]] = [
    {},
    {"adapter": "X"},
    {"salt": "X"},
    {"salt": b"X"},
    {"salt": "X", "adapter": "X"},
    {"adapter": "org_1", "salt": "2345"},
    {"adapter": "org_12345"},
    {"salt": "org_12345"},
    {"salt": "org_1", "adapter": "2345"},
    {"adapter": "a|b", "salt": "c"},
    {"adapter": "a", "salt": "b|c"},
    {"adapter": "a\0b", "salt": "c"},
    {"adapter": "a", "salt": "b\0c"},
    {"salt": "\u00e9"},  # é composed
    {"salt": "e\u0301"},  # é decomposed
    {"salt": "\u00e9".encode()},
    {"adapter": "lora@1"},
    {"adapter": "lora@2"},
    {"salt": "None"},
    {"salt": "0"},
    {"salt": "\0"},
    {"group": 1},
    {"group": 256},
    {"block_tokens": 8},
    {"block_tokens": 4},
]


@pytest.mark.parametrize(
    "make", [tokens, hashes, lambda **a: hashes(**a, chained=False)], ids=["tokens", "alone", "chained"]
)
def test_every_scope_is_disjoint_from_every_other_in_all_blocks(make: Any) -> None:
    keys = [make(**scope) for scope in SCOPES]
    digests = [d for key in keys for d in key]

    assert all(len(key) >= 2 for key in keys)
    assert len(set(digests)) == len(digests)
    assert len(set(keys)) == len(keys)
    assert [make(**scope) for scope in SCOPES] == keys


@pytest.mark.parametrize("name", ["salt", "adapter"])
def test_empty_salt_or_adapter_is_refused_rather_than_taken_for_none(name: str) -> None:
    for make in (tokens, hashes):
        with pytest.raises(ValueError, match=f"{name} is empty; pass a non-empty .*, or None for none"):
            make(**{name: ""})


EXTRAS: list[list[Any]] = [
    [],
    [b"a", b"b"],
    [b"ab"],
    [b"a", b"", b"b"],
    [b"b", b"a"],
    [b""],
    [b"", b""],
    [b"1"],
    ["1"],
    [1],
    [-1],
    [49],
    ["ab" * 30 + "0123"],
    ["cd" * 30 + "0123"],  # equal in the last 4
    ["ab" * 30 + "4567"],  # equal in the first 60
]


def test_extras_are_one_block_only_when_equal_in_type_content_order_and_place() -> None:
    lists = [[BlockExtra(0, value) for value in values] for values in EXTRAS]
    lists += [
        [BlockExtra(0, b"a", 3)],
        [BlockExtra(0, b"a", -3)],
        [BlockExtra(1, b"a")],
        [BlockExtra(0, b"a"), BlockExtra(1, b"a")],
    ]
    keys = [tokens(extra=extra) for extra in lists]

    assert len({key[1] for key in keys}) == len(keys)
    assert keys == [tokens(extra=extra) for extra in lists]


def test_neighbouring_images_are_told_apart_by_their_offset() -> None:
    placeholders = [9] * 16
    first_is_short = [BlockExtra(0, "A"), BlockExtra(0, "B", offset=4)]
    first_is_long = [BlockExtra(0, "A"), BlockExtra(0, "B", offset=12)]

    assert tokens(placeholders, extra=first_is_short) != tokens(placeholders, extra=first_is_long)


def test_same_tokens_under_another_prefix_are_other_blocks() -> None:
    prefixes = [None, [1] * 16, [2] * 16, [1] * 32, [1] * 16 + [2] * 16, [2] * 16 + [1] * 16]
    digests = [d for prefix in prefixes for d in tokens(prefix=prefix)]

    assert len(set(digests)) == len(digests)


def test_permuted_blocks_are_other_sequences() -> None:
    blocks = [[n] * 4 for n in range(4)]
    last = {tokens([*itertools.chain(*order)], block_tokens=4)[-1] for order in itertools.permutations(blocks)}

    assert len(last) == 24


@pytest.mark.parametrize("make", [lambda v: [v] * 16, lambda v: [0] * 15 + [v]])
def test_tokens_are_never_cut_to_fewer_bits(make: Any) -> None:
    values = [65, 321, 65 + 2**16, 65 + 2**24, 65 + 2**31, 0, 2**32 - 1]

    assert len({tokens(make(v))[0] for v in values}) == len(values)


def test_kinds_with_equal_payloads_are_different_blocks() -> None:
    word = (7).to_bytes(4, "little")
    keys = [
        tokens([7], block_tokens=1),
        *(hashes([v], block_tokens=1, chained=c) for v in (7, word) for c in (True, False)),
    ]

    assert len({key[0] for key in keys}) == len(keys)
    assert len({(key.kind, key[0]) for key in keys}) == len(keys)


def test_digest_of_a_block_is_no_hash_of_its_block() -> None:
    key = hashes(["a"])

    assert hashes([key[0]])[0] != key[0]
    assert key.coarsen(1)[0] == key[0] != hashes(["a", "b"]).coarsen(2)[0]


def test_random_chains_never_share_a_name() -> None:
    """100,000 blocks that differ by few values: prefixes, order, sizes, salts."""
    rng = random.Random(20240601)
    names: set[tuple[int, bytes]] = set()
    made: set[tuple[Any, ...]] = set()
    while len(made) < 100_000:
        salt = rng.choice([None, "a", b"a"])
        size = rng.choice([1, 2, 3])
        ids = rng.choices(range(3), k=size * 24)
        key = tokens(ids, block_tokens=size, salt=salt)
        made.update((size, salt, *ids[: (n + 1) * size]) for n in range(24))
        names.update((key.kind, d) for d in key)

    assert len(names) == len(made)
