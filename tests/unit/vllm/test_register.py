"""Short names are registered with whatever factories a vLLM has."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from kvstore_vllm import register as plugin
from kvstore_vllm.running_config import find_vllm_config

from kvstore import ConfigError
from tests.unit.vllm.support import vllm_config


class Factory:
    """One of vLLM's: refuses a name twice, imports a class only when it is used."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_tier(self, name: str, module: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(name)
        self._registry[name] = (module, class_name)

    register_connector = register_tier


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> dict[str, Factory]:
    made = {}
    for module_name, factory_name, _, _ in plugin._REGISTRATIONS:
        module: Any = ModuleType(module_name)
        made[factory_name] = Factory()
        setattr(module, factory_name, made[factory_name])
        monkeypatch.setitem(sys.modules, module_name, module)
        parent = module_name
        while "." in parent:
            parent = parent.rpartition(".")[0]
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    return made


def test_tier_and_connector_are_registered_once(factories: dict[str, Factory]) -> None:
    plugin.register()
    plugin.register()
    assert factories["SecondaryTierFactory"]._registry == {"kvstore": ("kvstore_vllm.tier", "KVStoreTier")}
    assert factories["KVConnectorFactory"]._registry == {
        "KVStoreConnector": ("kvstore_vllm.connector", "KVStoreConnector")
    }


def test_a_vllm_without_tiers_still_gets_the_connector(
    factories: dict[str, Factory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.factory", None)
    plugin.register()
    assert factories["KVConnectorFactory"]._registry


def test_the_config_is_read_from_the_constructor_that_makes_the_tier() -> None:
    wanted = vllm_config()

    def tier() -> Any:
        return find_vllm_config()

    def connector(vllm_config: Any) -> Any:
        return tier()

    assert connector(wanted) is wanted


def test_a_vllm_that_makes_tiers_in_another_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="KVStoreConnector"):
        find_vllm_config()
