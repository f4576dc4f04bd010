from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstore.backend import Backend
from kvstore.codec import Codec, OpenSegment
from kvstore.errors import PluginConflictError, PluginError, PluginLoadError, PluginNotFoundError
from kvstore.events import CacheEvent, CacheInfo
from kvstore.hookspecs import hookimpl
from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import BackendPlugin, CodecPlugin, PolicyPlugin, Registry
from kvstore.segments import SegmentGeometry
from kvstore.spec import BlockSpec
from tests.unit.plugins.fakes import HOOKS, write_dist

INFO = CacheInfo("c1", "00" * 16, ("l1",), 16, 4096)
EVENTS = [CacheEvent("stored", "c1", "l1", (b"\0" * 32,))]


@dataclass(frozen=True, slots=True)
class NoOptions:
    pass


class XorCodec(Codec):
    codec_id = 77
    name = "xor"

    def supports(self, spec: BlockSpec) -> bool:
        return False

    def encode_segment(self, raw: memoryview, geometry: SegmentGeometry) -> None:
        return None

    def open_segment(self, stored: memoryview, geometry: SegmentGeometry) -> OpenSegment:
        raise NotImplementedError


def module(name: str, **hooks: Callable[..., Any]) -> ModuleType:
    """A hooks module made of functions."""
    made = ModuleType(name)
    for hook_name, function in hooks.items():
        setattr(made, hook_name, hookimpl(function))
    return made


def backend_module(name: str, factory: Callable[[], Any], module_name: str = "kvx") -> ModuleType:
    plugin = BackendPlugin(name=name, options=NoOptions, factory=factory, summary="one")
    return module(module_name, kvstore_register_backends=lambda: [plugin])


def codec_module(name: str, codec_id: int, factory: Callable[[], Any] = XorCodec) -> ModuleType:
    plugin = CodecPlugin(name=name, codec_id=codec_id, factory=factory, summary="one")
    return module(f"kv_{name}", kvstore_register_codecs=lambda: [plugin])


def registry_with(made: ModuleType, name: str = "mine") -> Registry:
    registry = Registry()
    registry.register(made, name)
    return registry


def test_unknown_name_gets_the_nearest_one_and_what_is_installed() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        Registry.discover().backend("memroy")
    for part in ("unknown backend 'memroy'", "did you mean 'memory'?", "installed: ", "kvstore plugins list"):
        assert part in str(caught.value)


def test_missing_plugin_of_kvstore_itself_gets_an_install_hint() -> None:
    with pytest.raises(PluginNotFoundError, match="pip install --force-reinstall llm-kvstore"):
        Registry().backend("lmdb")


def test_name_of_another_kind_says_what_it_is() -> None:
    with pytest.raises(PluginNotFoundError, match=r"'none' \(llm-kvstore .*\) is a codec, not a backend"):
        Registry.discover().backend("none")


def test_names_of_a_kind_are_not_mixed_with_other_kinds() -> None:
    registry = Registry.discover()
    assert "memory" in registry.names("backend")
    assert "memory" not in registry.names("codec")
    assert {"lru", "fifo", "prefix-lru", "s3fifo"} <= set(registry.names("policy"))
    assert set(registry.names("codec")) < set(registry.names())


def test_several_entry_points_on_one_module_load_it_once(site: Path) -> None:
    source = f"""{HOOKS}
import kvcount
kvcount.n += 1

@hookimpl
def kvstore_register_policies():
    return [PolicyPlugin(name=name, factory=factory, summary=name) for name in ("one", "two")]
"""
    write_dist(site, entry_points={"one": "kvg", "two": "kvg"}, modules={"kvg": source, "kvcount": "n = 0"})
    registry = Registry.discover()
    assert registry.policy("one").summary == "one"
    assert registry.policy("two").summary == "two"
    assert sys.modules["kvcount"].n == 1


def test_threads_that_ask_at_once_import_a_plugin_once(site: Path) -> None:
    source = f"""{HOOKS}
import kvcount
kvcount.n += 1

@hookimpl
def kvstore_register_policies():
    return [PolicyPlugin(name="one", factory=factory, summary="s")]
"""
    write_dist(site, entry_points={"one": "kvg"}, modules={"kvg": source, "kvcount": "n = 0"})
    registry = Registry.discover()
    barrier = threading.Barrier(8)
    found: list[PolicyPlugin] = []

    def ask() -> None:
        barrier.wait()
        found.append(registry.policy("one"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert sys.modules["kvcount"].n == 1


def test_blocked_plugin_is_refused_and_not_imported(site: Path) -> None:
    write_dist(site)
    registry = Registry.discover(blocked=["good", "", " "])
    with pytest.raises(PluginError, match="is blocked; remove it from blocked_plugins"):
        registry.backend("good")
    assert next(info for info in registry.list() if info.name == "good").status == "blocked"
    assert "kvg" not in sys.modules
    assert registry.backend("memory").name == "memory"


def test_blocking_one_side_does_not_hide_a_conflict_of_another_name(site: Path) -> None:
    write_dist(site)
    write_dist(site, "kv-shadow", entry_points={"good": "kvs"}, modules={})
    registry = Registry.discover(blocked=["memory"])
    with pytest.raises(PluginConflictError):
        registry.backend("good")


def test_strict_discovery_skips_blocked_plugins(site: Path) -> None:
    write_dist(site, modules={"kvg": "1 / 0"})
    names = [name for name in Registry.discover().names() if name != "good"]
    Registry.discover(strict=True, blocked=["good", *names])
    assert "kvg" not in sys.modules


def test_in_process_plugin_is_used_like_an_installed_one() -> None:
    registry = registry_with(backend_module("ram", MemoryBackend))
    assert isinstance(registry.create_backend("ram"), MemoryBackend)
    assert [(info.name, info.status, info.distribution) for info in registry.list()] == [
        ("ram", "active", "in process"),
    ]


def test_in_process_plugin_may_not_shadow_an_installed_one() -> None:
    registry = Registry.discover()
    with pytest.raises(PluginConflictError, match="llm-kvstore"):
        registry.register(backend_module("memory", MemoryBackend), "mine")
    registry.register(backend_module("ram", MemoryBackend), "mine")  # the refused module left nothing behind
    assert registry.backend("memory").summary != "one"


def test_module_registered_twice_is_refused() -> None:
    made = backend_module("ram", MemoryBackend)
    registry = registry_with(made)
    with pytest.raises(PluginLoadError, match="already registered"):
        registry.register(made, "again")
    assert registry.backend("ram").name == "ram"


def test_backend_without_an_abstract_method_is_an_error_at_open() -> None:
    class Half(Backend):
        def get_many(self, names: Any, receive: Any, call: Any) -> Any:
            return []

    with pytest.raises(PluginLoadError, match=r"'ram' \(in process.*abstract.*usage"):
        registry_with(backend_module("ram", Half)).create_backend("ram")


def test_backend_method_of_another_arity_is_an_error_at_open() -> None:
    class Short(MemoryBackend):
        def put_many(self, items: Any) -> Any:  # type: ignore[override]
            return []

    with pytest.raises(PluginLoadError, match=r"Short.put_many cannot be called as put_many\(items, call\)"):
        registry_with(backend_module("ram", Short)).create_backend("ram")


def test_backend_method_without_a_declared_keyword_is_an_error_at_open() -> None:
    class NoBump(MemoryBackend):
        def epoch(self, namespace: bytes) -> bytes:  # type: ignore[override]
            return b""

    with pytest.raises(PluginLoadError, match=r"NoBump.epoch cannot be called as epoch\(namespace, \*, bump\)"):
        registry_with(backend_module("ram", NoBump)).create_backend("ram")


def test_backend_with_a_coroutine_method_is_an_error_at_open() -> None:
    class Async(MemoryBackend):
        async def close(self) -> None:  # type: ignore[override]
            pass

    with pytest.raises(PluginLoadError, match=r"Async.close is a coroutine function"):
        registry_with(backend_module("ram", Async)).create_backend("ram")


def test_missing_driver_at_open_names_distribution_and_driver(site: Path) -> None:
    source = f"""{HOOKS}
def driver():
    import boto99

@hookimpl
def kvstore_register_backends():
    return [BackendPlugin(name="good", options=Options, factory=driver, summary="s")]
"""
    write_dist(site, modules={"kvg": source})
    with pytest.raises(PluginLoadError, match=r"kv-good 1\.2.*making its backend raised.*No module named 'boto99'"):
        Registry.discover().create_backend("good")


def test_factory_that_makes_something_else_is_an_error_at_open() -> None:
    with pytest.raises(PluginLoadError, match=r"made 3, which is no subclass of kvstore\.backend\.Backend"):
        registry_with(backend_module("ram", lambda: 3)).create_backend("ram")


def test_codec_must_be_the_one_its_descriptor_announces() -> None:
    assert registry_with(codec_module("xor", 77)).create_codec("xor").codec_id == 77
    with pytest.raises(PluginLoadError, match=r"announces codec \('xor', 78\), its factory made codec \('xor', 77\)"):
        registry_with(codec_module("xor", 78)).create_codec("xor")


def test_two_codecs_may_not_share_an_id() -> None:
    registry = registry_with(codec_module("xor", 77))
    with pytest.raises(PluginLoadError, match="codec 'nor' has the id 77, which is codec 'xor'"):
        registry.register(codec_module("nor", 77), "other")
    assert registry.codec_by_id(77) is registry.codec("xor")
    assert "nor" not in registry.names()


def test_codec_by_id_finds_kvstores_own_without_being_told() -> None:
    found = Registry.discover().codec_by_id(0)
    assert found is not None
    assert found.name == "none"


def test_codec_by_id_imports_no_foreign_plugin(site: Path) -> None:
    write_dist(site, modules={"kvg": "1 / 0"})
    assert Registry.discover().codec_by_id(4711) is None
    assert "kvg" not in sys.modules


def test_codec_by_id_honours_blocking() -> None:
    registry = Registry.discover(blocked=["none"])
    assert registry.codec_by_id(0) is None


def test_policy_gets_its_capacity() -> None:
    capacities: list[int] = []

    def policy(capacity_blocks: int) -> None:
        capacities.append(capacity_blocks)

    plugin = PolicyPlugin(name="mine", factory=policy, summary="one")  # type: ignore[arg-type]
    registry = registry_with(module("kvp", kvstore_register_policies=lambda: [plugin]))
    with pytest.raises(PluginLoadError, match="made None"):
        registry.create_policy("mine", 42)
    assert capacities == [42]


def test_check_reports_what_a_good_plugin_provides() -> None:
    findings = Registry.discover().check("memory")
    assert [finding.ok for finding in findings] == [True, True]
    assert "llm-kvstore" in findings[0].detail
    assert findings[1].subject == "backend memory"
    assert "MemoryBackend" in findings[1].detail


def test_check_reports_a_bad_factory_and_a_bad_import_without_raising(site: Path) -> None:
    findings = registry_with(backend_module("ram", lambda: 3)).check("ram")
    assert [finding.ok for finding in findings] == [True, False]
    write_dist(site, modules={"kvg": "1 / 0"})
    (finding,) = Registry.discover().check("good")
    assert not finding.ok
    assert "ZeroDivisionError" in finding.detail


def test_raising_observer_stops_no_other_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    def bad(events: object) -> None:
        raise RuntimeError("no collector")

    def hear(events: object) -> None:
        seen.append(events)

    def counts_calls() -> None:
        seen.append("called")

    registry = Registry()
    registry.register(module("kv_bad", kvstore_events=bad), "bad")
    registry.register(module("kv_good", kvstore_events=hear), "good")
    registry.register(module("kv_bare", kvstore_events=counts_calls), "bare")
    observers = registry.observers()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            for observer in observers:
                observer(EVENTS)
    assert [observer.failures for observer in observers] == [3, 0, 0]
    assert seen == [EVENTS, "called"] * 3
    assert len(caplog.records) == 1
    assert "kvstore_events of plugin 'bad'" in caplog.text


def test_observer_loaded_late_hears_of_caches_opened_before() -> None:
    heard: list[tuple[str, CacheInfo]] = []

    def early(cache_info: CacheInfo) -> None:
        heard.append(("early", cache_info))

    def late(cache_info: CacheInfo) -> None:
        heard.append(("late", cache_info))

    registry = registry_with(module("kv_early", kvstore_cache_opened=early))
    registry.cache_opened(INFO)
    registry.register(module("kv_late", kvstore_cache_opened=late), "late")
    assert heard == [("early", INFO), ("late", INFO)]


def test_observer_that_raises_at_replay_is_registered_all_the_same() -> None:
    def bad(cache_info: CacheInfo) -> None:
        raise RuntimeError("no collector")

    registry = Registry()
    registry.cache_opened(INFO)
    registry.register(module("kv_bad", kvstore_cache_opened=bad), "bad")
    assert registry.load("bad").kinds == ("observer",)
