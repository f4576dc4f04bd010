"""A module imports lower floors or its own, nobody goes around, nothing goes in circles."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from tests.layers.floors import FLOORS, HEAVY, LIGHT, MAY_IMPORT_PLUGINS, THIRD_PARTY, unit_of, within
from tests.layers.imports import Import, find_cycle, graph, report, shipped_sources


def top(name: str) -> str:
    return name.partition(".")[0]


def is_ours(name: str) -> bool:
    return top(name) == "kvstore" or name.startswith("kvstore_")


def internal(sources: Mapping[str, str]) -> dict[str, list[Import]]:
    return {module: [i for i in found if is_ours(i.target)] for module, found in graph(sources).items()}


def unlisted_modules(sources: Mapping[str, str]) -> list[str]:
    return [module for module in sources if unit_of(module) is None]


def floor_breaks(sources: Mapping[str, str]) -> list[str]:
    breaks = []
    for module, found in internal(sources).items():
        unit = unit_of(module)
        if unit is None or unit == "kvstore":  # the facade names everything and imports on first use
            continue
        for item in found:
            target_unit = unit_of(item.target)
            if target_unit is None or target_unit == unit:
                continue
            here, there = FLOORS[unit], FLOORS[target_unit]
            same_floor = here == there and top(unit) == top(target_unit)
            if there > here or (there == here and not same_floor):
                breaks.append(f"{module}:{item.line} (floor {here}) imports {item.target} (floor {there})")
            if (
                item.target.startswith("kvstore_")
                and top(item.target) != top(module)
                and not within(module, MAY_IMPORT_PLUGINS)
            ):
                breaks.append(f"{module}:{item.line} names the plugin package {item.target}; ask the registry for it")
    return breaks


def module_cycle(sources: Mapping[str, str]) -> list[str] | None:
    """A cycle among imports that run when a module is imported."""
    edges: dict[str, set[str]] = {}
    for module, found in internal(sources).items():
        edges[module] = {i.target for i in found if i.scope == "module" and i.target in sources and i.target != module}
    return find_cycle(edges)


def unit_cycle(sources: Mapping[str, str]) -> list[str] | None:
    """A cycle among units of the floor table, also through imports inside functions."""
    edges: dict[str, set[str]] = {}
    for module, found in internal(sources).items():
        unit = unit_of(module)
        if unit is None or unit == "kvstore":
            continue
        targets = {unit_of(i.target) for i in found if i.scope != "typing"}
        edges.setdefault(unit, set()).update(t for t in targets if t is not None and t != unit)
    return find_cycle(edges)


def third_party_breaks(sources: Mapping[str, str]) -> list[str]:
    breaks = []
    for module, found in graph(sources).items():
        for item in found:
            name = top(item.target)
            if is_ours(item.target) or name in sys.stdlib_module_names or item.scope == "typing":
                continue
            if not within(module, THIRD_PARTY.get(name, ())):
                breaks.append(f"{module}:{item.line} imports {name}, which is not for it")
    return breaks


def heavy_reached(sources: Mapping[str, str], roots: tuple[str, ...]) -> list[str]:
    """Chains of module-level imports from a root to something heavy."""
    edges = graph(sources)
    chains = []
    for root in roots:
        seen: set[str] = set()
        stack = [(root, root)]
        while stack:
            module, chain = stack.pop()
            if module in seen or module not in edges:
                continue
            seen.add(module)
            if parent := module.rpartition(".")[0]:
                stack.append((parent, f"{chain} > {parent}"))
            for item in edges[module]:
                if item.scope != "module":
                    continue
                if top(item.target) in HEAVY:
                    chains.append(f"{chain} > {item.target} (line {item.line})")
                stack.append((item.target, f"{chain} > {item.target}"))
    return chains


def light_roots(sources: Mapping[str, str]) -> tuple[str, ...]:
    return (*LIGHT, *(module for module in sources if module.rpartition(".")[2] == "hooks"))


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return shipped_sources()


def test_every_shipped_module_has_a_floor(sources: dict[str, str]) -> None:
    assert len(sources) > 20, "the search for shipped modules found next to nothing"
    found = unlisted_modules(sources)
    assert not found, report(found, "enter them in tests/layers/floors.py")


def test_every_entry_of_the_floor_table_is_a_module(sources: dict[str, str]) -> None:
    assert [unit for unit in FLOORS if unit not in sources] == []


def test_every_light_root_is_a_module(sources: dict[str, str]) -> None:
    assert [root for root in light_roots(sources) if root not in sources] == []


def test_imports_go_to_lower_floors(sources: dict[str, str]) -> None:
    found = floor_breaks(sources)
    assert not found, report(found)


def test_no_module_imports_itself_through_others(sources: dict[str, str]) -> None:
    assert module_cycle(sources) is None
    assert unit_cycle(sources) is None


def test_third_party_packages_stay_where_they_belong(sources: dict[str, str]) -> None:
    found = third_party_breaks(sources)
    assert not found, report(found)


def test_import_and_discovery_reach_nothing_heavy(sources: dict[str, str]) -> None:
    found = heavy_reached(sources, light_roots(sources))
    assert not found, report(found)


def test_the_rules_catch_what_they_forbid() -> None:
    upward = {"kvstore.spec": "def f():\n    from kvstore.cache import KVCache\n", "kvstore.cache": ""}
    assert floor_breaks(upward) == ["kvstore.spec:2 (floor 1) imports kvstore.cache (floor 5)"]
    dynamic = {
        "kvstore.l2.tier": "import importlib\nimportlib.import_module('kvstore_lmdb.backend')",
        "kvstore_lmdb.backend": "",
    }
    assert len(floor_breaks(dynamic)) == 2
    relative = {
        "kvstore.keys": "",
        "kvstore.keys.key": "from ..l1 import pool",
        "kvstore.l1": "",
        "kvstore.l1.pool": "",
    }
    assert floor_breaks(relative) == ["kvstore.keys.key:1 (floor 1) imports kvstore.l1.pool (floor 4)"]
    assert unlisted_modules({"kvstore.misc": "", "kvstore.keys.key": ""}) == ["kvstore.misc"]
    ring = {
        "kvstore.keys.a": "from kvstore.keys import b",
        "kvstore.keys.b": "import kvstore.keys.a",
        "kvstore.keys": "",
    }
    assert module_cycle(ring) == ["kvstore.keys.a", "kvstore.keys.b", "kvstore.keys.a"]
    lazy_ring = {"kvstore.l1": "def f():\n    import kvstore.l2", "kvstore.l2": "import kvstore.l1"}
    assert module_cycle(lazy_ring) is None
    assert unit_cycle(lazy_ring) == ["kvstore.l1", "kvstore.l2", "kvstore.l1"]
    assert third_party_breaks({"kvstore.keys.key": "import boto3\nimport requests\nimport json"}) == [
        "kvstore.keys.key:1 imports boto3, which is not for it",
        "kvstore.keys.key:2 imports requests, which is not for it",
    ]


def test_heavy_imports_are_found_through_other_modules_and_parent_packages() -> None:
    through = {"kvstore": "", "kvstore.keys": "from kvstore import tensors", "kvstore.tensors": "import torch"}
    assert heavy_reached(through, ("kvstore.keys",)) == ["kvstore.keys > kvstore.tensors > torch (line 1)"]
    parent = {"kvstore_lmdb": "import lmdb", "kvstore_lmdb.hooks": ""}
    assert heavy_reached(parent, ("kvstore_lmdb.hooks",)) == ["kvstore_lmdb.hooks > kvstore_lmdb > lmdb (line 1)"]
    lazy = {"kvstore": "def f():\n    import torch\nif TYPE_CHECKING:\n    import numpy"}
    assert heavy_reached(lazy, ("kvstore",)) == []
