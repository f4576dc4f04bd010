"""Putting these modules where code that was written for AIBrix looks for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from kvstore.errors import PluginConflictError

PACKAGE: Final = "aibrix_kvcache"

_lock: Final = threading.Lock()


class _Offered(ModuleType):
    """A module of ours under a name of theirs."""


def put_in_place(modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Make ``import aibrix_kvcache`` find the given names; does nothing when it does already.

    Args:
        modules: Names by module, relative to the package; ``""`` is the package itself.

    Raises:
        PluginConflictError: Another package of that name has been imported.
    """
    with _lock:
        present = sys.modules.get(PACKAGE)
        if isinstance(present, _Offered):
            return
        foreign = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
        if foreign:
            where = getattr(present, "__file__", None) or "an unknown place"
            msg = (
                f"{PACKAGE} was imported already, from {where}; call kvstore.compat.aibrix.install() before anything "
                "imports it"
            )
            raise PluginConflictError(msg)
        made = {name: _module(name, names, modules) for name, names in modules.items()}
        for name, module in made.items():
            parent, _, child = name.rpartition(".")
            if name:
                setattr(made[parent], child, module)
        sys.modules.update({module.__name__: module for module in made.values()})


def take_away() -> None:
    """Undo :func:`put_in_place`; leaves another package of that name alone."""
    with _lock:
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Offered):
                del sys.modules[name]


def _module(name: str, names: Mapping[str, Any], modules: Mapping[str, Any]) -> ModuleType:
    full = f"{PACKAGE}.{name}" if name else PACKAGE
    is_package = not name or any(other.startswith(f"{name}.") for other in modules)
    module = _Offered(full, f"{full} as kvstore.compat.aibrix offers it.")
    module.__spec__ = ModuleSpec(full, loader=None, is_package=is_package)
    if is_package:
        module.__path__ = []  # what is not offered is not found, wherever else it may be installed
    module.__dict__.update(names)
    module.__dict__["__all__"] = sorted(names)
    return module
