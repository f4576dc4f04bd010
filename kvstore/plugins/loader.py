"""Finding installed plugins without importing them, and importing one without trusting it.

pluggy's own ``load_setuptools_entrypoints`` is not used: one import error in it aborts the load of
every other plugin, ``sys.exit()`` in a plugin ends the process, and of two distributions with one
name the second is ignored silently (docs/adr/0005-plugin-host.md).
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from types import MappingProxyType, ModuleType
from typing import Final

from kvstore.errors import PluginLoadError
from kvstore.hookspecs import PROJECT

_log: Final = logging.getLogger(__name__)

OWN_DISTRIBUTION: Final = "llm-kvstore"
IN_PROCESS: Final = "in process"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry point that claims a plugin name.

    Attributes:
        name: The claimed name.
        target: The hooks module, as written in the entry point.
        distribution: Distribution that installed it.
        version: Its version.
    """

    name: str
    target: str
    distribution: str
    version: str = ""

    @property
    def origin(self) -> str:
        """``"kv-good 1.2"``: the distribution and its version."""
        return f"{self.distribution} {self.version}".strip()

    def describe(self) -> str:
        """Name plugin, distribution and entry point for messages."""
        return f"plugin {self.name!r} ({self.origin}, entry point {self.name} = {self.target!r})"


Candidates = Mapping[str, tuple[Candidate, ...]]
"""Plugin name to what claims it; more than one is a conflict."""


def installed() -> Candidates:
    """Return what is installed; imports no plugin.

    The scan reads every distribution's entry points, so it happens once per process and
    ``sys.path``.
    """
    return _scan(tuple(sys.path))


@functools.lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> Candidates:  # the cache's key is what distributions() reads: sys.path
    found: dict[str, dict[str, Candidate]] = {}
    for distribution in distributions(path=list(path)):
        try:
            candidates = _claims(distribution)
        except Exception as e:  # noqa: BLE001 - border: one damaged dist-info must not hide the other plugins
            _log.warning("cannot read the entry points of %r: %s: %s", distribution, type(e).__name__, e)
            continue
        for candidate in candidates:
            # The same target twice is one plugin: an editable install leaves egg-info beside dist-info.
            found.setdefault(candidate.name, {}).setdefault(candidate.target, candidate)
    return MappingProxyType({name: tuple(by_target.values()) for name, by_target in sorted(found.items())})


def _claims(distribution: Distribution) -> list[Candidate]:
    # Parsing only the files that mention the group takes a fifth of importlib.metadata.entry_points(),
    # which parses them all (7 ms against 31 ms with 117 distributions).
    text = distribution.read_text("entry_points.txt") or ""
    if f"[{PROJECT}]" not in text:
        return []
    metadata = distribution.metadata  # a directory without METADATA has neither name nor version
    name = str(metadata["Name"]) if "Name" in metadata else ""
    if name and Distribution.from_name(name).read_text("entry_points.txt") != text:
        return []  # another version of the distribution comes first on sys.path
    version = str(metadata["Version"]) if "Version" in metadata else ""
    return [
        Candidate(entry.name, entry.value.strip(), name or "unknown distribution", version)
        for entry in distribution.entry_points.select(group=PROJECT)
    ]


def import_hooks(candidate: Candidate) -> ModuleType:
    """Import the hooks module of ``candidate``.

    Raises:
        PluginLoadError: The entry point does not name a module, or importing it raised anything
            but ``KeyboardInterrupt``: a plugin's ``sys.exit()``, or the panic of a native
            extension (a ``BaseException``), must not end the host.
    """
    if ":" in candidate.target or not all(part.isidentifier() for part in candidate.target.split(".")):
        msg = f"{candidate.describe()} is broken: the entry point must name a hooks module, such as 'kvstore_x.hooks'"
        raise PluginLoadError(msg)
    try:
        return importlib.import_module(candidate.target)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        msg = f"{candidate.describe()} is broken: importing {candidate.target} raised {type(e).__name__}: {e}"
        raise PluginLoadError(msg) from e
