"""Every way in which a selected plugin can be broken, and what the error says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstore.errors import PluginIncompatibleError, PluginLoadError
from kvstore.plugins import Registry
from tests.unit.plugins.fakes import GOOD, HOOKS, write_dist


def hook(declaration: str, body: str) -> str:
    return f"{HOOKS}\n@hookimpl\ndef {declaration}:\n    {body}\n"


def backends(body: str) -> str:
    return hook("kvstore_register_backends()", body)


def backend(**changes: str) -> str:
    """Source of a descriptor; ``changes`` are source texts of its fields."""
    fields = {"name": '"good"', "options": "Options", "factory": "factory", "summary": '"A good one"'} | changes
    return f"BackendPlugin({', '.join(f'{name}={value}' for name, value in fields.items())})"


def with_options(declaration: str, decorator: str = "@dataclass(frozen=True)") -> str:
    return f"{HOOKS}\n{decorator}\nclass Mine:\n    {declaration}\n" + backends(
        f"return [{backend(options='Mine')}]"
    ).removeprefix(HOOKS)


AT_IMPORT = {
    "missing-driver": ("import boto99", "ModuleNotFoundError: No module named 'boto99'"),
    "syntax-error": ("def (", "SyntaxError"),
    "sys-exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "native-panic": ("class PanicException(BaseException): pass\nraise PanicException('out')", "PanicException: out"),
    "any-exception": ("1 / 0", "ZeroDivisionError"),
}

AT_REGISTRATION = {
    "misspelt-hook": (hook("kvstore_register_backend()", "return []"), ["unknown hook", "kvstore_register_backends"]),
    "unknown-argument": (hook("kvstore_events(happenings)", "pass"), ["happenings"]),
    "default-argument": (hook("kvstore_events(events=())", "pass"), ["'events' a default value"]),
    "keyword-only": (hook("kvstore_events(*, events)", "pass"), ["keyword-only"]),
    "async": (f"{HOOKS}\n@hookimpl\nasync def kvstore_events(events): pass", ["coroutine"]),
    "wrapper": (f"{HOOKS}\n@hookimpl(wrapper=True)\ndef kvstore_events(events): yield", ["wrapper"]),
    "no-hooks": ("x = 1", ["implements no hook", "kvstore_register_backends"]),
    "raises-on-dir": (f"{GOOD}\ndef __dir__(): raise OSError('device not open')", ["device not open"]),
    "hook-raises": (backends("raise RuntimeError('no device')"), ["RuntimeError: no device"]),
    "generator-raises": (backends("yield 1 / 0"), ["ZeroDivisionError"]),
    "returns-none": (backends("pass"), ["returned None", "list of descriptors"]),
    "returns-class": (backends("return [Options]"), ["expected BackendPlugin descriptors"]),
    "returns-codec": (
        backends('return [CodecPlugin(name="good", codec_id=99, factory=factory, summary="s")]'),
        ["expected BackendPlugin"],
    ),
    "twice": (backends(f"return [{backend()}, {backend()}]"), ["'good' twice"]),
    "other-name": (backends(f"return [{backend(name=repr('goof'))}]"), ["'goof'", "add 'goof = \"kvg\"'"]),
    "bad-name": (backends(f"return [{backend(name=repr('Good_one'))}]"), ["'Good_one'", "lower-case"]),
    "factory": (backends(f"return [{backend(factory='3')}]"), ["factory 3 is not callable"]),
    "no-summary": (backends(f"return [{backend(summary=repr(''))}]"), ["one line"]),
    "options-dict": (backends(f"return [{backend(options='{}')}]"), ["options {} is not a dataclass type"]),
    "options-not-frozen": (with_options("path: str = 'x'", "@dataclass"), ["Mine must be frozen"]),
    "options-reserved": (with_options("capacity: int = 1"), ["'capacity' of Mine is a key of the core"]),
    "options-type": (with_options("paths: dict = None"), ["'paths' has the type", "tuple[str, ...]"]),
    "options-name": (with_options("path: 'Nowhere' = None"), ["Mine cannot be resolved", "Nowhere"]),
    "default-admit": (backends(f"return [{backend(default_admit=repr('some'))}]"), ["default_admit 'some'", "hot"]),
    "default-codec": (backends(f"return [{backend(default_codec='None')}]"), ["default_codec None"]),
    "default-deadline": (backends(f"return [{backend(default_deadline_s='0')}]"), ["default_deadline_s 0"]),
    "default-capacity": (backends(f"return [{backend(default_capacity_bytes='-1')}]"), ["default_capacity_bytes -1"]),
    "max-writers": (backends(f"return [{backend(max_writers='True')}]"), ["max_writers True"]),
    "codec-id": (
        hook(
            "kvstore_register_codecs()",
            'return [CodecPlugin(name="good", codec_id=65536, factory=factory, summary="s")]',
        ),
        ["codec_id 65536", "0 to 65535"],
    ),
}


@pytest.mark.parametrize(("source", "cause"), AT_IMPORT.values(), ids=AT_IMPORT)
def test_import_failure_names_distribution_entry_point_and_cause(site: Path, source: str, cause: str) -> None:
    write_dist(site, modules={"kvg": source})
    registry = Registry.discover()
    with pytest.raises(PluginLoadError) as caught:
        registry.backend("good")
    for part in ("'good'", "kv-good 1.2", "good = 'kvg'", cause):
        assert part in str(caught.value)
    assert caught.value.__cause__ is not None  # the plugin's own traceback
    info = next(info for info in registry.list() if info.name == "good")
    assert (info.status, info.detail) == ("broken", str(caught.value))


def test_keyboard_interrupt_during_import_is_the_users(site: Path) -> None:
    write_dist(site, modules={"kvg": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        Registry.discover().backend("good")


@pytest.mark.parametrize(("source", "parts"), AT_REGISTRATION.values(), ids=AT_REGISTRATION)
def test_malformed_plugin_is_refused_as_a_whole(site: Path, source: str, parts: list[str]) -> None:
    write_dist(site, modules={"kvg": source})
    registry = Registry.discover()
    with pytest.raises(PluginLoadError) as caught:
        registry.load("good")
    for part in ("plugin 'good'", "kv-good 1.2", *parts):
        assert part in str(caught.value)
    assert next(info for info in registry.list() if info.name == "good").status == "broken"
    assert registry.observers() == ()


@pytest.mark.parametrize("target", ["kvg:plugin", "not a module", "", "1kvg"])
def test_entry_point_must_name_a_module(site: Path, target: str) -> None:
    write_dist(site, entry_points={"good": target})
    with pytest.raises(PluginLoadError, match="must name a hooks module"):
        Registry.discover().load("good")


def test_other_api_version_names_both_versions(site: Path) -> None:
    write_dist(site, modules={"kvg": backends(f"return [{backend(api_version='99')}]")})
    registry = Registry.discover()
    with pytest.raises(PluginIncompatibleError) as caught:
        registry.backend("good")
    for part in ("kv-good 1.2", "plugin API 99", "this kvstore speaks 1"):
        assert part in str(caught.value)
    assert next(info for info in registry.list() if info.name == "good").status == "incompatible"


def test_name_that_its_module_does_not_know_is_broken_and_its_sibling_is_not(site: Path) -> None:
    write_dist(site, entry_points={"good": "kvg", "alias": "kvg"})
    registry = Registry.discover()
    with pytest.raises(PluginLoadError, match="registers nothing named 'alias'"):
        registry.backend("alias")
    assert registry.backend("good").name == "good"
    assert {info.name: info.status for info in registry.list() if info.target == "kvg"} == {
        "good": "active",
        "alias": "broken",
    }


def test_broken_plugin_is_imported_once_and_keeps_its_error(site: Path) -> None:
    write_dist(site, modules={"kvg": "import kvcount; kvcount.n += 1; 1 / 0", "kvcount": "n = 0"})
    registry = Registry.discover()
    errors = []
    for _ in range(2):
        with pytest.raises(PluginLoadError) as caught:
            registry.load("good")
        errors.append(caught.value)
    assert sys.modules["kvcount"].n == 1
    assert str(errors[0]) == str(errors[1])
    assert isinstance(errors[1].__cause__, ZeroDivisionError)


def test_broken_observer_plugin_leaves_no_observer_behind(site: Path) -> None:
    source = (
        backends(f"return [{backend(name=repr('unannounced'))}]") + "\n@hookimpl\ndef kvstore_events(events): pass\n"
    )
    write_dist(site, modules={"kvg": source})
    registry = Registry.discover()
    with pytest.raises(PluginLoadError):
        registry.load("good")
    assert registry.observers() == ()


def test_strict_discovery_raises_on_the_first_bad_plugin(site: Path) -> None:
    write_dist(site, "kv-a", entry_points={"a-broken": "kva"}, modules={"kva": "1 / 0"})
    with pytest.raises(PluginLoadError, match="a-broken"):
        Registry.discover(strict=True)


def test_lenient_discovery_with_a_broken_plugin_raises_nothing(site: Path) -> None:
    write_dist(site, modules={"kvg": "1 / 0"})
    assert "good" in Registry.discover().names()
