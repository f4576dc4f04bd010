"""Laws about options, descriptions and what importing the plugin costs."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import Final

import pytest

from kvstore.backend import Backend, Capability
from kvstore.config import Config, load_config
from kvstore.errors import UnknownKeyError
from kvstore.plugins.options import option_fields
from kvstore.testing.laws.deletes import eventually
from kvstore.testing.neighbour import environment
from kvstore.testing.samples import item_of, put_all
from kvstore.testing.store import Store

_KEPT_S: Final = 2.0  # it may be written in the background

_IMPORTED = """
import importlib, sys
import kvstore.backend, kvstore.hookspecs, kvstore.plugins
before = set(sys.modules)
importlib.import_module(sys.argv[1])
for name in sorted({m.partition(".")[0] for m in set(sys.modules) - before} - sys.stdlib_module_names):
    print(name)
"""


def _keeps(backend: Backend, text: bytes) -> bool:
    return text in backend.namespaces()


class SettingsLaws:
    """Options are a schema, secrets stay secret, discovery stays cheap."""

    def test_options_survive_a_round_trip_through_config(self, store: Store) -> None:
        config = load_config({"l1": {"enabled": False}, "l2": [store.target.tier()]}, store.registry)
        options = config.l2[0].options
        assert type(options) is store.plugin.options
        again = load_config(Config.from_mapping(config.to_dict()), store.registry)
        assert again == config
        assert again.l2[0].options == options

    def test_an_unknown_option_is_refused_by_name(self, store: Store) -> None:
        config = {"l2": [store.target.tier(no_such_option=1)]}
        with pytest.raises(UnknownKeyError, match="no_such_option"):
            load_config(config, store.registry)

    def test_every_option_is_documented(self, store: Store) -> None:
        undocumented = [field.name for field in option_fields(store.plugin.options) if not field.doc.strip()]
        assert undocumented == []

    def test_options_are_immutable(self, store: Store) -> None:
        options = store.context().options
        for field in option_fields(store.plugin.options):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(options, field.name, None)

    def test_secrets_are_in_no_description(self, backend: Backend, store: Store) -> None:
        options = store.context().options
        values = [getattr(options, field.name) for field in option_fields(type(options)) if field.secret]
        facts = backend.describe()
        shown = f"{options!r} {facts} {backend!r}"
        assert [value for value in values if value and str(value) in shown] == []

    def test_facts_are_text(self, backend: Backend) -> None:
        facts = backend.describe()
        assert {type(text) for pair in facts.items() for text in pair} <= {str}

    def test_a_description_of_a_namespace_is_kept_as_it_was_given_or_not_at_all(self, store: Store) -> None:
        texts: dict[bytes, bytes] = {}
        kept = False
        for i in (1, 2):
            namespace, text = bytes([i]) * 16, f'{{"digest": "{i:02x}", "model": "caf\u00e9 {i}"}}\n'
            texts[text.encode()] = namespace
            with store.opened(namespace=namespace, namespace_json=text) as backend:
                put_all(backend, [item_of(i)])
                kept = eventually(functools.partial(_keeps, backend, text.encode()), _KEPT_S)
                foreign = [one for one in backend.namespaces() if one not in texts]
                assert foreign == []
                assert kept or backend.namespaces() == []
        if store.has(Capability.PERSISTENT):
            with store.opened(read_only=True) as backend:
                assert not kept or set(backend.namespaces()) == set(texts)

    def test_the_descriptor_is_sound(self, store: Store) -> None:
        assert [finding for finding in store.registry.check(store.target.plugin) if not finding.ok] == []

    def test_the_hooks_module_imports_no_driver(self, store: Store) -> None:
        hooks = store.target.hooks or _target(store)
        if not hooks:
            return  # a module made in this process
        command = [sys.executable, "-W", "error", "-c", _IMPORTED, hooks]
        done = subprocess.run(  # noqa: S603 - our own interpreter
            command, env=environment(), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        own = {hooks.partition(".")[0], "kvstore"}
        assert [name for name in done.stdout.split() if name not in own] == []


def _target(store: Store) -> str:
    (info,) = [info for info in store.registry.list() if info.name == store.target.plugin]
    return "" if info.distribution == "in process" else info.target
