"""What can be set, as vLLM passes it on."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace as Attributes
from typing import Any

import pytest
from kvstore_vllm.connector_options import ConnectorOptions, read_connector_options
from kvstore_vllm.options import EngineOptions

from kvstore.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "vllm-connector.md"


def read(extra: dict[str, Any] | None) -> ConnectorOptions:
    return read_connector_options(Attributes(kv_transfer_config=Attributes(kv_connector_extra_config=extra)))


def test_every_option_can_be_set() -> None:
    given = {
        "config": {"l2": []},
        "load": "layerwise",
        "layerwise_save": True,
        "workers": 2,
        "lookup_wait": "5ms",
        "lookup_ttl": 0.5,
        "on_reset": "part",
        "salt": "s",
    }
    options = read(given)
    assert (options.load, options.layerwise_save, options.workers) == ("layerwise", True, 2)
    assert (options.lookup_wait, options.lookup_ttl, options.on_reset) == (0.005, 0.5, "part")


@pytest.mark.parametrize(
    ("name", "value"), [("load", "eager"), ("workers", 0), ("on_reset", True), ("lookup_wait", "soon"), ("salt", "")]
)
def test_a_wrong_value_names_its_option(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        read({name: value})


def test_an_unknown_option_is_named_with_its_neighbour(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvstore.vllm"):
        assert read({"laod": "async"}) == ConnectorOptions()
    assert "laod" in caplog.text
    assert "load" in caplog.text
    assert read(None) == ConnectorOptions()


def test_the_reference_names_every_option_and_its_default() -> None:
    page = PAGE.read_text()
    shared = {field.name for field in fields(EngineOptions)}
    for field in fields(ConnectorOptions):
        if field.name in shared:
            assert f"`{field.name}`" in page
        else:
            default = getattr(ConnectorOptions(), field.name)
            shown = (
                f'"{default}"'
                if isinstance(default, str)
                else f"{default:g}"
                if not isinstance(default, bool)
                else str(default).lower()
            )
            assert f"| `{field.name}` | `{shown}` |" in page
