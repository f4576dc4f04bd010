"""The hooks modules that were loaded, those that could not be, and what they provide."""

from __future__ import annotations

import logging
from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kvstore.errors import PluginError, PluginIncompatibleError, PluginLoadError
from kvstore.plugins import messages
from kvstore.plugins.catalog import Catalog
from kvstore.plugins.descriptors import CodecPlugin, Kind, PluginInfo, Status
from kvstore.plugins.host import HooksHost, LoadedModule
from kvstore.plugins.loader import IN_PROCESS, Candidate, import_hooks

if TYPE_CHECKING:
    from kvstore.events import CacheInfo
    from kvstore.plugins.observers import Observer

_log: Final = logging.getLogger(__name__)

_HISTORY: Final = 64  # opened caches that an observer loaded later is told about; a process opens a handful


class Modules:
    """Loads the modules behind the names of a catalog, each at most once.

    Not thread-safe: the registry calls it under its lock.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog: Final = catalog
        self._host: Final = HooksHost()
        self._loaded: Final[dict[str, LoadedModule]] = {}  # by target
        self._failures: Final[dict[str, PluginError]] = {}  # by target
        self._codec_names: Final[dict[int, str]] = {}
        self._opened: Final[deque[CacheInfo]] = deque(maxlen=_HISTORY)

    def load(self, candidate: Candidate) -> LoadedModule:
        """Return the module behind ``candidate``, imported and registered now or earlier.

        Raises:
            PluginIncompatibleError: It speaks another plugin API version.
            PluginLoadError: It is broken, or has nothing of the candidate's name.
        """
        target = candidate.target
        if target in self._failures:
            known = self._failures[target]
            raise type(known)(str(known)) from known.__cause__
        if target not in self._loaded:
            try:
                self._import(candidate)
            except PluginError as e:
                self._failures[target] = e
                raise
        loaded = self._loaded[target]
        if not loaded.kinds(candidate.name):
            raise PluginLoadError(messages.provides_nothing(candidate))
        return loaded

    def load_own(self) -> None:
        """Load what comes with kvstore; log what is broken."""
        for candidate in self._catalog.own():
            if candidate.target not in self._loaded and candidate.target not in self._failures:
                try:
                    self.load(candidate)
                except PluginError as e:
                    _log.warning("%s", e)

    def register(self, module: ModuleType, name: str) -> None:
        """Add a module of this process under the names that it provides; all or nothing.

        Raises:
            PluginConflictError: One of the names is taken.
            PluginError: The module is broken or incompatible.
        """
        candidate = Candidate(name, module.__name__, IN_PROCESS)
        loaded = self._host.register(module, candidate.describe())
        names = dict.fromkeys(key for _, key in loaded.descriptors)
        if loaded.observes:
            names[name] = None
        try:
            codec_ids = self._new_codec_ids(loaded, candidate)
            self._catalog.add(Candidate(key, candidate.target, IN_PROCESS) for key in names)
        except PluginError:
            self._host.unregister(module)
            raise
        self._activate(candidate.target, loaded, codec_ids)

    def codec_name(self, codec_id: int) -> str | None:
        """Return the loaded codec of that id."""
        return self._codec_names.get(codec_id)

    def observers(self) -> tuple[Observer, ...]:
        """Return what wants block events."""
        return tuple(loaded.events for loaded in self._loaded.values() if loaded.events is not None)

    def remember_opened(self, cache_info: CacheInfo) -> list[Observer]:
        """Keep ``cache_info`` for modules loaded later; return who wants to hear of it now."""
        self._opened.append(cache_info)
        return [loaded.opened for loaded in self._loaded.values() if loaded.opened is not None]

    def info(self, name: str) -> PluginInfo:
        """Describe the claimed ``name``; imports nothing."""
        claims = self._catalog.claims(name)
        status, detail, kinds = self._state(name, claims[0])
        return PluginInfo(
            name=name,
            distribution=", ".join(claim.distribution for claim in claims),
            version=", ".join(claim.version for claim in claims),
            target=", ".join(claim.target for claim in claims),
            status=status,
            detail=detail,
            kinds=kinds,
        )

    def _state(self, name: str, candidate: Candidate) -> tuple[Status, str, tuple[Kind, ...]]:
        refusal = self._catalog.refusal(name)
        if refusal is not None:
            return ("blocked" if self._catalog.is_blocked(name) else "conflict"), str(refusal), ()
        failure = self._failures.get(candidate.target)
        if failure is not None:
            return ("incompatible" if isinstance(failure, PluginIncompatibleError) else "broken"), str(failure), ()
        loaded = self._loaded.get(candidate.target)
        if loaded is None:
            return "installed", "", ()
        if not loaded.kinds(name):
            return "broken", messages.provides_nothing(candidate), ()
        return "active", loaded.summary(name), loaded.kinds(name)

    def _import(self, candidate: Candidate) -> None:
        module = import_hooks(candidate)
        loaded = self._host.register(module, candidate.describe())
        try:
            for kind, name in loaded.descriptors:
                if all(claim.target != candidate.target for claim in self._catalog.claims(name)):
                    raise PluginLoadError(messages.no_entry_point(candidate, kind, name))
            codec_ids = self._new_codec_ids(loaded, candidate)
        except PluginError:
            self._host.unregister(module)
            raise
        self._activate(candidate.target, loaded, codec_ids)

    def _activate(self, target: str, loaded: LoadedModule, codec_ids: dict[int, str]) -> None:
        self._loaded[target] = loaded
        self._codec_names.update(codec_ids)
        if loaded.opened is not None:
            for cache_info in self._opened:
                loaded.opened(cache_info)

    def _new_codec_ids(self, loaded: LoadedModule, candidate: Candidate) -> dict[int, str]:
        added: dict[int, str] = {}
        for descriptor in loaded.descriptors.values():
            if isinstance(descriptor, CodecPlugin):
                other = (self._codec_names | added).get(descriptor.codec_id)
                if other is not None:
                    raise PluginLoadError(
                        messages.same_codec_id(candidate, descriptor.name, descriptor.codec_id, other)
                    )
                added[descriptor.codec_id] = descriptor.name
        return added
