"""The laws of keys: two implementations agree, cutting commutes, containers do not matter, hostile ones are refused."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import numpy as np

from kvstore.errors import KeyMismatchError
from kvstore.keys import BlockExtra, KVCacheKey
from tests.fuzz.inputs import Choices
from tests.unit.keys.test_vectors import expected_digests


class Number(IntEnum):
    """Looks like a token id and is none."""

    ONE = 1


class Lying:
    """A sequence whose length and items disagree."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index > 1:
            raise IndexError
        return index


HOSTILE: Final[tuple[Any, ...]] = (
    *(-1, 1 << 32, 1 << 64, -(1 << 70), True, 1.0, float("nan"), None, "1", b"1", Number.ONE, [1], {1}, object()),
    *(np.float32(1), np.bool_(True), np.int64(-1), np.uint64(1 << 63), 1j),  # noqa: FBT003 - numpy's own
)
NO_SEQUENCE: Final = tuple(value for value in HOSTILE if not isinstance(value, list))
NO_HASHES: Final[tuple[Any, ...]] = (None, 7, b"text", "text", {b"a"})
CONTAINERS: Final[tuple[Callable[[list[int]], Any], ...]] = (
    tuple,
    lambda ids: array("Q", ids),
    lambda ids: np.array(ids, np.uint32),
    lambda ids: np.array(ids, np.int64),
    lambda ids: np.array(ids, ">u8"),
    lambda ids: np.array([ids, ids], np.uint64).T[:, 0],
    lambda ids: [np.uint32(i) for i in ids],
    lambda ids: np.repeat(np.array(ids, np.uint64), 2)[::2],
)


def keys(data: bytes) -> None:
    """A key as the bytes say, checked in every way; then the same with one hostile value in it."""
    choices = Choices(data)
    scope = _scope(choices)
    if choices.below(2):
        _token_laws(choices, scope)
    else:
        _hash_laws(choices, scope)


def _scope(choices: Choices) -> dict[str, Any]:
    scope: dict[str, Any] = {"block_tokens": 1 + choices.below(5)}
    salt = choices.one((None, "text", "bytes"))
    if salt is not None:
        scope["salt"] = (choices.text() or "s") if salt == "text" else {"hex": choices.take(3).hex()}
    if choices.below(2):
        scope["adapter"] = choices.text() or "a"
    if choices.below(2):
        scope["group"] = choices.number(4)
    return scope


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """A case of the golden vectors as arguments: ``{"hex": ...}`` is bytes."""
    return {n: bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for n, v in case.items()}


def digests(key: KVCacheKey) -> list[str]:
    """What stored names are made of."""
    return [digest.hex() for digest in key]


def _token_laws(choices: Choices, scope: dict[str, Any]) -> None:
    n = scope["block_tokens"]
    ids = [choices.number(choices.one((1, 4))) for _ in range(choices.below(24))]
    cut = choices.below(len(ids) // n + 1)
    before, after = ids[: cut * n], ids[cut * n :]
    extra: list[dict[str, Any]]
    extra = [{"block": choices.below(len(ids) // n), "value": choices.text(), "offset": 0}] if len(ids) >= n else []
    extra = extra if choices.below(2) else []
    given = [BlockExtra(**item) for item in extra]
    known = arguments(scope)
    whole = KVCacheKey.from_tokens(ids, **known, extra=given)
    assert digests(whole) == expected_digests({**scope, "tokens": ids, "extra": extra})
    assert list(whole.tokens.cast("B").cast("I")) + list(whole.tail_tokens.cast("B").cast("I")) == ids
    assert KVCacheKey.from_tokens(after, **known, prefix=before, extra=given) == whole.suffix(cut)
    if not extra:
        first = KVCacheKey.from_tokens(before, **known)
        assert KVCacheKey.from_tokens(after, block_tokens=n, prefix=first) == whole.suffix(cut)
        assert choices.one(CONTAINERS)(ids) is not None
        assert KVCacheKey.from_tokens(choices.one(CONTAINERS)(ids), **known) == whole
    _run_laws(choices, whole, {**scope, "tokens": ids, "extra": extra})
    wrong = [*ids[: choices.below(len(ids) + 1)], choices.one(HOSTILE), *ids]
    for container in (list, tuple):
        refused(lambda container=container: KVCacheKey.from_tokens(container(wrong), **known))  # type: ignore[misc]
    refused(lambda: KVCacheKey.from_tokens(choices.one(NO_SEQUENCE), **known))
    refused(lambda: KVCacheKey.from_tokens(np.array(ids, np.float64) + 0.5, **known), or_fine=not ids)
    refused(lambda: KVCacheKey.from_tokens(Lying(), **known))  # type: ignore[arg-type]


def _hash_laws(choices: Choices, scope: dict[str, Any]) -> None:
    known, chained = arguments(scope), bool(choices.below(2))
    plain = [_some_hash(choices) for _ in range(choices.below(10))]
    hashes = [bytes.fromhex(h["hex"]) if isinstance(h, dict) else h for h in plain]
    cut = choices.below(len(hashes) + 1)
    whole = KVCacheKey.from_block_hashes(hashes, **known, chained=chained)
    case = {**scope, "hashes": plain, "chained": chained}
    assert digests(whole) == expected_digests(case)
    after = KVCacheKey.from_block_hashes(hashes[cut:], **known, chained=chained, prefix=hashes[:cut])
    assert digests(after) == digests(whole.suffix(cut))
    _run_laws(choices, whole, case)
    wrong: list[Any] = [*hashes[:cut], choices.one((None, True, 1.5, [b"a"], Number.ONE, object())), *hashes[cut:]]
    refused(lambda: KVCacheKey.from_block_hashes(wrong, **known, chained=chained))
    refused(lambda: KVCacheKey.from_block_hashes(choices.one(NO_HASHES), **known, chained=chained))


def _some_hash(choices: Choices) -> Any:
    form = choices.below(3)
    if form == 0:
        return {"hex": choices.take(choices.below(40)).hex()}
    return choices.text() if form == 1 else choices.number(9) - (1 << 40)


def _run_laws(choices: Choices, whole: KVCacheKey, case: dict[str, Any]) -> None:
    at = choices.below(len(whole) + 1)
    left, right = whole.split(at)
    assert [*left, *right] == list(whole) == list(whole[:at]) + list(whole[at:])
    assert (whole[:at], whole[at:]) == (left, right)
    assert hash(whole[at:]) == hash(right)
    assert (left == whole) == (at == len(whole))
    more = choices.below(len(right) + 1)
    assert right.suffix(more) == whole.suffix(at + more)
    assert right.prefix(more) == whole.prefix(at + more).suffix(at)
    assert right.parent == (whole[at - 1] if at else whole.parent)
    k = 1 + choices.below(4)
    coarse = whole.coarsen(k)
    assert digests(coarse) == expected_digests({**case, "coarsen": k})
    assert coarse.block_tokens == k * whole.block_tokens
    if at % k == 0:
        assert digests(whole.suffix(at).coarsen(k)) == digests(coarse)[at // k :]
    else:
        refused(lambda: whole.suffix(at).coarsen(k))
    refused(lambda: whole.prefix(len(whole) + 1))
    refused(lambda: whole.coarsen(0))


def refused(make: Callable[[], object], *, or_fine: bool = False) -> None:
    """Whatever was given is refused as the documentation says, and not otherwise."""
    try:
        make()
    except (ValueError, TypeError, KeyMismatchError):
        return
    assert or_fine, "hostile input was taken"
