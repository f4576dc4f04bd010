"""Distributions written by hand: metadata directories and modules, as an installer leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

HOOKS = """
from dataclasses import dataclass
from kvstore.hookspecs import hookimpl
from kvstore.plugins import BackendPlugin, CodecPlugin, PolicyPlugin

@dataclass(frozen=True)
class Options:
    path: str = "x"

def factory(*args):
    raise AssertionError("registration must not make anything")
"""

GOOD = (
    HOOKS
    + """
@hookimpl
def kvstore_register_backends():
    return [BackendPlugin(name="good", options=Options, factory=factory, summary="A good one")]
"""
)


def write_dist(
    site: Path,
    name: str = "kv-good",
    version: str = "1.2",
    *,
    entry_points: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
    kind: str = "dist-info",
) -> None:
    """Install a distribution into ``site``; by default one that provides the backend ``good``."""
    entry_points = {"good": "kvg"} if entry_points is None else entry_points
    modules = {"kvg": GOOD} if modules is None else modules
    info = site / f"{name.replace('-', '_')}-{version}.{kind}"
    info.mkdir(parents=True)
    file = "METADATA" if kind == "dist-info" else "PKG-INFO"
    (info / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[kvstore]", *lines, ""]))
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
