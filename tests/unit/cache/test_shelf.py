"""Codecs of a cache: tried at open, made with options, one for each thread, never in anybody's place."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace
from kvstore.codec import Codec
from kvstore.errors import ConfigError, PluginError
from kvstore.hookspecs import hookimpl
from kvstore.l2.shelf import CodecShelf, Coding
from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import BackendPlugin, Registry
from tests import doubles
from tests.support_faults import noise, same, target
from tests.support_sealing import NAME, XorCodec, XorOptions, sealing_registry

SPEC = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
NAMESPACE = Namespace(model="test/model", revision="r1")
KEY = KVCacheKey.from_tokens(range(16 * 3), block_tokens=16)


def with_backend(registry: Registry, **more: Any) -> Registry:
    module = ModuleType("hooks_of_an_eager_backend")

    @hookimpl
    def kvstore_register_backends() -> list[BackendPlugin]:
        return [
            BackendPlugin(
                name="eager",
                options=doubles.NoOptions,
                factory=MemoryBackend,
                summary="eager",
                **{"default_codec": NAME, **more},
            )
        ]

    module.kvstore_register_backends = kvstore_register_backends  # type: ignore[attr-defined]
    registry.register(module, "eager")
    return registry


def open_cache(registry: Registry, codec: str = "auto", **sections: Any) -> KVCache:
    config = {"l1": {"enabled": False}, "l2": [{"backend": "eager", "codec": codec}], **sections}
    return KVCache.open(config, spec=SPEC, namespace=NAMESPACE, registry=registry)


def test_a_sealing_codec_is_never_a_backends_choice() -> None:
    sections: dict[str, Any] = {"codecs": {NAME: {"phrase": "p"}}}
    with pytest.raises(PluginError, match=r"backend 'eager' chooses the codec 'xor-seal', which seals"):
        open_cache(with_backend(sealing_registry()), **sections)
    with open_cache(with_backend(sealing_registry()), NAME, **sections) as cache:
        blocks = noise(SPEC, range(3))
        cache.put(KEY, blocks)
        cache.flush(10)
        out = target(SPEC, 3)
        assert cache.get(KEY, out) == 3
        assert same(out, blocks)
    open_cache(with_backend(sealing_registry(), default_codec="none"), **sections).close()


def test_what_a_section_sets_up_is_tried_even_if_no_tier_writes_with_it() -> None:
    with pytest.raises(ConfigError, match="phrase is not set"):
        open_cache(with_backend(sealing_registry()), "none", codecs={NAME: {}})
    open_cache(with_backend(sealing_registry()), "none", codecs={NAME: {"phrase": "p"}}).close()


def shelf(**options: Any) -> CodecShelf:
    coding = Coding({NAME: XorOptions(phrase="p", **options)})
    return CodecShelf(sealing_registry(), SPEC, NAMESPACE.digest(SPEC), coding)


def test_a_wrapped_codec_is_the_threads_own() -> None:
    kept = shelf(inner="planes")
    found: list[tuple[Codec | None, Codec | None]] = []

    def look() -> None:
        codec = kept._codec(XorCodec.codec_id)
        assert isinstance(codec, XorCodec)
        found.append((codec._inner, kept._codec(2)))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first, first_again), (second, second_again) = found
    assert first is first_again is not None
    assert second is second_again is not None
    assert first is not second


def test_a_codec_that_wraps_itself_or_nothing_known_is_told_that_there_is_none() -> None:
    for inner in (NAME, "no-such-codec"):
        codec = shelf(inner=inner)._codec(XorCodec.codec_id)
        assert isinstance(codec, XorCodec)
        assert codec._inner is None


def test_a_wrapped_codec_that_is_not_set_up_is_missing_when_a_segment_names_it() -> None:
    kept = CodecShelf(sealing_registry(), SPEC, NAMESPACE.digest(SPEC))
    assert kept._wrapped(XorCodec.codec_id) is None
    with pytest.raises(ConfigError, match="phrase is not set"):
        kept._wrapped(NAME)
    assert isinstance(shelf()._wrapped(XorCodec.codec_id), XorCodec)
    registry = sealing_registry()
    assert registry.find_codec(XorCodec.codec_id) is registry.find_codec(NAME) is registry.find_codec("no") is None
    assert registry.find_codec(60_000) is None
    planes = registry.find_codec(2)
    assert planes is not None
    assert planes.name == "planes"


def test_the_shelf_tells_what_seals() -> None:
    assert shelf().seals(NAME)
    assert not shelf().seals("planes")
    assert not shelf().seals("none")
