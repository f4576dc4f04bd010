"""Every form of a call means the same, and nothing that is given is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.compat import aibrix
from kvstore.compat.aibrix.arguments import normalise
from tests.unit.compat.rig import KINDS, ids_of, own_memory, store, values

Cache = aibrix.BaseKVCacheManager


@pytest.mark.parametrize("kind", KINDS)
def test_all_forms_of_a_read_are_one_call(cache: Any, kind: str) -> None:
    query = ids_of(kind, 4)
    store(cache, None, query)
    prefix, rest = query[:4], query[4:]
    key = aibrix.KVCacheKey(prefix, rest)
    forms: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((prefix, rest), {}),
        ((prefix,), {"query": rest}),
        ((), {"prefix": prefix, "query": rest}),
        ((key,), {}),
        ((), {"cache_key": key}),
    ]
    for args, kwargs in forms:
        assert type(normalise(args, kwargs).query) is type(query)
        assert cache.exists(*args, **kwargs).value == 12
        n_tokens, handle = cache.acquire(*args, **kwargs).get()
        assert (n_tokens, values(handle.to_tensors())) == (12, [1, 2, 3])
        handle.release()
        memory, own = own_memory(cache, 3)
        assert cache.get(*args, **kwargs, kv_tensors=own).value == 12
        assert values(list(memory)) == [1, 2, 3]
        cache.prefetch(*args, **kwargs)
    for args in ((prefix, rest), (key,)):
        memory, own = own_memory(cache, 3)
        assert cache.get(*args, own).value == 12
    assert cache.delete(cache_key=key).is_ok()
    assert cache.exists(None, query).value == 4


@pytest.mark.parametrize("kind", KINDS)
def test_all_forms_of_a_put_are_one_call(cache: Any, kind: str) -> None:
    query = ids_of(kind, 3)
    prefix, rest = query[:4], query[4:]
    key = aibrix.KVCacheKey(prefix, rest)
    forms: list[tuple[tuple[Any, ...], tuple[str, ...]]] = [
        ((prefix, rest), ()),
        ((prefix,), ("query",)),
        ((), ("prefix", "query")),
        ((key,), ()),
        ((), ("cache_key",)),
    ]
    named = {"prefix": prefix, "query": rest, "cache_key": key}
    for args, names in forms:
        kwargs = {name: named[name] for name in names}
        handle = cache.allocate_for(*args, **kwargs).get()
        assert cache.put(*args, **kwargs, kv_tensors=handle).value == 8
        assert cache.delete(key).is_ok()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("query",), {}),
        ((), {"query": "query"}),
        ((None, "query"), {"query": "query"}),
        ((None, "query"), {"timeout": 3}),
        ((None, "query"), {"kv_tensors": None}),
        ((None, "query", "query"), {}),
        (("key", "query"), {}),
        (("key",), {"query": "query"}),
        (("key",), {"cache_key": "key"}),
        ((), {"cache_key": "query"}),
        ((None, None), {}),
        ((None, [1, 2, 3, 4]), {}),
        (([1, 2, 3, 4], "query"), {}),
    ],
)
def test_a_call_of_no_form_is_refused(cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    query = ids_of("tokens", 2)
    named = {"query": query, "key": aibrix.KVCacheKey(None, query)}

    def real(value: Any) -> Any:
        return named.get(value, value) if isinstance(value, str) else value

    for call in (cache.exists, cache.acquire, cache.allocate_for, cache.delete, cache.prefetch):
        with pytest.raises(TypeError):
            call(*map(real, args), **{name: real(value) for name, value in kwargs.items()})


def test_a_call_that_needs_a_handle_says_so(cache: Cache) -> None:
    query = ids_of("tokens", 2)
    for bad in ({}, {"kv_tensors": None}, {"kv_tensors": [1, 2]}):
        with pytest.raises(TypeError, match="kv_tensors"):
            cache.put(None, query, **bad)
        with pytest.raises(TypeError, match="kv_tensors"):
            cache.get(None, query, **bad)


def test_prefix_and_query_of_two_kinds_are_refused(cache: Cache) -> None:
    tokens, hashes = ids_of("tokens", 2), ids_of("hashes", 2)
    with pytest.raises(TypeError, match="prefix is of type BlockHashes"):
        cache.exists(hashes, tokens)
    with pytest.raises(TypeError, match="prefix is of type TokenListView"):
        aibrix.KVCacheKey(tokens, hashes)
    with pytest.raises(ValueError, match="one size"):
        cache.exists(aibrix.BlockHashes(["a"], 2), hashes)
