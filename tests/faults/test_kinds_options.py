"""Kinds P9 and P11: options that nothing reads, and settings that come in by a second way that nobody checks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import fields

import pytest

from kvstore.config.sections import defaults_fields, gate_fields, l1_fields, tier_fields
from kvstore.plugins import Registry
from kvstore.plugins.options import option_fields
from tests.layers.imports import shipped_sources

CORE = {"l1": l1_fields, "defaults": defaults_fields, "gate": gate_fields, "l2": tier_fields}
PACKAGES = ("kvstore_lmdb", "kvstore_nvme", "kvstore_s3", "kvstore_zstd", "kvstore_aesgcm")
PLUGINS = ("memory", "lmdb", "nvme", "s3")

ENVIRONMENT = {
    "kvstore.config.loader": "KVSTORE_CONFIG names the file; it holds no setting itself",
    "kvstore.keyring": "env:NAME is a source that a setting names",
    "kvstore.compat.aibrix": "AIBrix's variables, which become a config and are checked like one",
    "kvstore.engines": "where an engine keeps model files, and KVSTORE_CONFIG",
}
"""Who may read the environment of the process."""


@functools.cache
def reads(source: str) -> set[str]:
    """Names of the attributes that a module reads anywhere but where it checks its own options."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        todo += ast.iter_child_nodes(node)
    return found


def options() -> Iterator[tuple[str, str, str]]:
    """Section, option, and the package that must read it."""
    for section, schema in CORE.items():
        for option in schema():
            yield section, option.name, "kvstore"
    registry = Registry.discover()
    for name in PLUGINS:
        plugin = registry.backend(name)
        for option in option_fields(plugin.options):
            yield name, option.name, plugin.options.__module__.partition(".")[0]
    codec = registry.codec("aes-gcm")
    assert codec.options is not None
    for field in fields(codec.options):
        yield "codecs.aes-gcm", field.name, "kvstore_aesgcm"


SOURCES = shipped_sources()
OPTIONS = list(options())


@pytest.mark.parametrize(("section", "name", "package"), OPTIONS, ids=[f"{s}.{n}" for s, n, _ in OPTIONS])
def test_every_option_is_read_by_what_it_configures(section: str, name: str, package: str) -> None:
    passed_on = ("kvstore.config", "kvstore.cli")  # read, shown and written, which is no use
    readers = [m for m, source in SOURCES.items() if m.partition(".")[0] == package and name in reads(source)]
    readers = [module for module in readers if not module.startswith(passed_on)]
    assert readers, f"{section}.{name} is parsed and never used"


def test_an_option_that_nobody_reads_is_found() -> None:
    assert len(OPTIONS) > 50
    assert reads("def f(o):\n    o.dead = 1\n    return o.live") == {"live"}
    assert reads("def __post_init__(self):\n    check(self.dead)") == set()


def reads_environment(source: str) -> bool:
    tree = ast.parse(source)
    taken = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "os" for a in n.names}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) if is_os(node.value)}
    return bool((taken | attributes) & {"environ", "environb", "getenv"})


def is_os(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "os"


def test_no_setting_comes_from_the_environment_past_the_config() -> None:
    found = [m for m, source in SOURCES.items() if reads_environment(source) and m.startswith(("kvstore.", *PACKAGES))]
    strangers = [module for module in found if not module.startswith((*ENVIRONMENT, "kvstore.cli", "kvstore.testing"))]
    assert len(found) > len(strangers)
    assert strangers == [], "give it a key of the config, so that one place checks it"


def test_a_look_into_the_environment_is_found() -> None:
    assert reads_environment("import os\nx = os.environ['A']")
    assert reads_environment("from os import getenv")
    assert not reads_environment("import os\nx = os.path")
