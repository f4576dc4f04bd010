"""Kinds of trouble with names: content that cannot be named, names that depend on the process, events of other names."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

import pytest

from kvstore import BlockExtra, KVCache, KVCacheKey, Namespace, hookimpl
from kvstore.events import CacheEvent
from tests import doubles
from tests.support_faults import NAMESPACE, SMALL, noise


class Pool(enum.IntEnum):
    """Its text depends on how it is printed."""

    MAMBA = 7


class Picture(enum.StrEnum):
    """Text, and yet an Enum."""

    CAT = "cat"


def key(**more: Any) -> KVCacheKey:
    return KVCacheKey.from_tokens(range(32), block_tokens=16, **more)


@pytest.mark.parametrize("value", [None, True, 1.5, object(), Pool.MAMBA, Picture.CAT, ("cat",)])
def test_content_that_has_no_id_gets_no_key_instead_of_the_key_of_the_tokens_alone(value: Any) -> None:
    with pytest.raises(TypeError):
        key(extra=[BlockExtra(0, value)])
    with pytest.raises(TypeError):
        key(extra=[value])


@pytest.mark.parametrize("value", [7, b"lora", Picture.CAT, True])
def test_only_text_names_an_adapter(value: Any) -> None:
    """A number that an engine hands out in the order of loading is another one in each process."""
    with pytest.raises(TypeError, match="adapter"):
        key(adapter=value)


def test_an_enum_names_no_model_and_no_salt() -> None:
    with pytest.raises(TypeError, match="model"):
        Namespace(model=Picture.CAT, revision="r1")
    with pytest.raises(TypeError, match="salt"):
        key(salt=Picture.CAT)


def test_events_name_blocks_as_the_store_does() -> None:
    seen: list[CacheEvent] = []
    module = ModuleType("observing")

    @hookimpl
    def kvstore_events(events: list[CacheEvent]) -> None:
        seen.extend(events)

    module.kvstore_events = kvstore_events  # type: ignore[attr-defined]
    backend = doubles.CountingBackend()
    registry, name = doubles.register(lambda: backend)
    registry.register(module, "observing")
    salted, adapted = key(salt="tenant", extra=[BlockExtra(1, "cat")]), key(salt="tenant", adapter="lora@2")
    config = {"l1": {"capacity": "4MiB"}, "l2": [{"backend": name, "name": "mem"}]}
    with KVCache.open(config, spec=SMALL, namespace=NAMESPACE, registry=registry) as cache:
        for made in (salted, adapted):
            cache.put(made, noise(SMALL, range(2)))
        cache.flush(10)
        cache.delete(adapted)
    stored = {digest for event in seen if event.kind == "stored" for digest in event.digests}
    assert stored == {put[17:] for put in backend.put_names} == {*salted, *adapted}
    removed = {digest for event in seen if event.kind in {"removed", "deleted"} for digest in event.digests}
    assert removed <= set(adapted)
