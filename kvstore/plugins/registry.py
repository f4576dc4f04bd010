"""The plugin registry: which names exist, and what stands behind them."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from kvstore.errors import ConfigError, PluginError
from kvstore.plugins import messages
from kvstore.plugins.catalog import Catalog
from kvstore.plugins.descriptors import BackendPlugin, CodecPlugin, Kind, PluginInfo, PolicyPlugin
from kvstore.plugins.loader import Candidate, Candidates, installed
from kvstore.plugins.modules import Modules

if TYPE_CHECKING:
    from kvstore.backend import Backend
    from kvstore.codec import Codec, CodecContext
    from kvstore.events import CacheInfo
    from kvstore.eviction import EvictionPolicy
    from kvstore.plugins.making import Finding
    from kvstore.plugins.observers import Observer

_D = TypeVar("_D", BackendPlugin, CodecPlugin, PolicyPlugin)


class Registry:
    """Installed plugins by name; imports one only when it is asked for.

    Thread-safe.  Importing a plugin blocks other calls on the same registry until it is done.

    Example:
        >>> registry = Registry.discover()
        >>> registry.backend("memory").name
        'memory'
    """

    def __init__(self, candidates: Candidates = MappingProxyType({}), *, blocked: Iterable[str] = ()) -> None:
        """Make a registry of ``candidates``; :meth:`discover` is what applications call."""
        self._catalog: Final = Catalog(candidates)
        self._catalog.block(blocked)
        self._modules: Final = Modules(self._catalog)
        self._lock: Final = threading.RLock()

    @classmethod
    def discover(cls, *, strict: bool = False, blocked: Iterable[str] = ()) -> Self:
        """Make a registry of all installed plugins.

        Scans the installed distributions once per process; imports nothing unless ``strict``.

        Args:
            strict: Load every plugin now and raise on the first one that is broken, incompatible
                or in conflict: for CI and for developing plugins.
            blocked: Plugin names that must not be loaded; empty ones are ignored.

        Raises:
            PluginError: With ``strict`` only.
        """
        registry = cls(installed(), blocked=blocked)
        if strict:
            for info in registry.list():
                if info.status != "blocked":
                    registry.load(info.name)
        return registry

    def block(self, *names: str) -> None:
        """Refuse ``names`` from now on; those that are not installed, or empty, have no effect."""
        with self._lock:
            self._catalog.block(names)

    def register(self, module: ModuleType, name: str) -> None:
        """Add a hooks module of this process, for library users and tests.

        Its descriptors need no entry points; all their names are available at once.

        Args:
            module: With functions marked :data:`kvstore.hookspecs.hookimpl`.
            name: The plugin's name in lists and messages.

        Raises:
            PluginConflictError: An installed or registered plugin has one of its names.
            PluginError: The module is broken or incompatible; nothing of it stays registered.
        """
        with self._lock:
            self._modules.register(module, name)

    def load(self, name: str) -> PluginInfo:
        """Import the plugin ``name`` unless that was done before.

        Raises:
            PluginNotFoundError: Nothing installed has that name.
            PluginConflictError: Several distributions have it.
            PluginIncompatibleError: It speaks another plugin API version.
            PluginLoadError: It is broken; the cause is chained.
            PluginError: It is blocked.
        """
        with self._lock:
            self._modules.load(self._candidate(name, None))
            return self._modules.info(name)

    def backend(self, name: str) -> BackendPlugin:
        """Return the descriptor of a storage backend; raises as :meth:`load` does."""
        return self._descriptor("backend", name, BackendPlugin)

    def codec(self, name: str) -> CodecPlugin:
        """Return the descriptor of a codec; raises as :meth:`load` does."""
        return self._descriptor("codec", name, CodecPlugin)

    def policy(self, name: str) -> PolicyPlugin:
        """Return the descriptor of an L1 eviction policy; raises as :meth:`load` does."""
        return self._descriptor("policy", name, PolicyPlugin)

    def codec_by_id(self, codec_id: int) -> CodecPlugin | None:
        """Return the codec that writes ``codec_id`` into records, or None when none is usable.

        Looks among the loaded plugins and those that come with kvstore.  To read the records of
        another distribution's codec, name it in a tier or in the config's ``plugins``.
        """
        with self._lock:
            if self._modules.codec_name(codec_id) is None:
                self._modules.load_own()
            name = self._modules.codec_name(codec_id)
            if name is None or self._catalog.refusal(name) is not None:
                return None
            return self.codec(name)

    def create_backend(self, name: str) -> Backend:
        """Make an unopened backend and check its methods.

        Raises:
            PluginLoadError: Its factory raised, or a method is missing or has other parameters
                than :class:`kvstore.backend.Backend` declares.
            PluginError: As :meth:`load`.
        """
        from kvstore.plugins import making  # Backend and Codec, which listing does not need

        return making.make_backend(self.backend(name), self.origin(name))

    def create_codec(self, name: str, context: CodecContext | None = None) -> Codec:
        """Make a codec, for one thread.

        Args:
            name: Of the codec.
            context: What a codec with options is made from; None for the options' defaults and
                wrapped codecs of its own.  Of no account to other codecs.

        Raises:
            ConfigError: The options do not let the codec work.
            PluginError: As :meth:`create_backend`.
        """
        from kvstore.codec import CodecContext
        from kvstore.plugins import making  # Backend and Codec, which listing does not need

        plugin = self.codec(name)
        if plugin.options is None:
            context = None
        elif context is None:
            context = CodecContext(making.default_options(plugin), self.find_codec)
        return making.make_codec(plugin, self.origin(name), context)

    def find_codec(self, wanted: str | int) -> Codec | None:
        """Make a codec for another one that wraps it.

        Args:
            wanted: Name, or id in records.

        Returns:
            The codec, made from the defaults of its options; None when it cannot be had.
        """
        plugin = self.codec_by_id(wanted) if isinstance(wanted, int) else None
        name = wanted if isinstance(wanted, str) else "" if plugin is None else plugin.name
        try:
            return self.create_codec(name) if name else None
        except (ConfigError, PluginError):
            return None

    def create_policy(self, name: str, capacity_blocks: int) -> EvictionPolicy:
        """Make an eviction policy for an L1 of that size; raises as :meth:`create_backend` does."""
        from kvstore.plugins import making  # Backend and Codec, which listing does not need

        return making.make_policy(self.policy(name), self.origin(name), capacity_blocks)

    def check(self, name: str) -> tuple[Finding, ...]:
        """Load the plugin ``name``, make one of each thing it provides and say what was found.

        Raises nothing about the plugin: what is wrong is a finding.  Opens and creates nothing.
        """
        from kvstore.plugins import making  # Backend and Codec, which listing does not need

        try:
            info = self.load(name)
        except PluginError as e:
            return (making.Finding(ok=False, subject=name, detail=str(e)),)
        with self._lock:
            loaded = self._modules.load(self._candidate(name, None))
        found = making.Finding(
            ok=True, subject=name, detail=f"{self.origin(name)} is loaded; provides: {', '.join(info.kinds)}"
        )
        own = [descriptor for (_, key), descriptor in loaded.descriptors.items() if key == name]
        return (found, *(making.try_descriptor(descriptor, self.origin(name), self.find_codec) for descriptor in own))

    def names(self, kind: Kind | None = None) -> tuple[str, ...]:
        """List the usable names of ``kind``, or all names.

        With a kind, the plugins that come with kvstore are loaded.  Others that are not loaded yet
        are listed for every kind, because only importing them would tell.
        """
        with self._lock:
            if kind is None:
                return tuple(self._catalog.names())
            self._modules.load_own()
            infos = [self._modules.info(name) for name in self._catalog.names()]
            return tuple(i.name for i in infos if i.status == "installed" or (i.status == "active" and kind in i.kinds))

    def list(self) -> builtins.list[PluginInfo]:
        """List every installed or registered plugin name with its state; imports nothing."""
        with self._lock:
            return [self._modules.info(name) for name in self._catalog.names()]

    def origin(self, name: str) -> str:
        """Name plugin, distribution and entry point for messages; raises if it is not usable."""
        with self._lock:
            return self._candidate(name, None).describe()

    def observers(self) -> tuple[Observer, ...]:
        """Return what wants block events, of the plugins loaded so far; calling one never raises.

        A cache resolves this once when it is opened, and does no event work when it is empty.
        """
        with self._lock:
            return self._modules.observers()

    def cache_opened(self, cache_info: CacheInfo) -> None:
        """Tell observers, also those loaded later, that a cache was opened; never raises."""
        with self._lock:
            observers = self._modules.remember_opened(cache_info)
        for observer in observers:
            observer(cache_info)

    def _descriptor(self, kind: Kind, name: str, expected: type[_D]) -> _D:
        with self._lock:
            candidate = self._candidate(name, kind)
            loaded = self._modules.load(candidate)
            descriptor = loaded.descriptors.get((kind, name))
            if not isinstance(descriptor, expected):
                raise messages.wrong_kind(candidate, kind, loaded.kinds(name), self.names(kind))
            return descriptor

    def _candidate(self, name: str, kind: Kind | None) -> Candidate:
        refusal = self._catalog.refusal(name)
        if refusal is not None:
            raise refusal
        claims = self._catalog.claims(name)
        if not claims:
            raise messages.not_found(name, kind or "plugin", self.names(kind))
        return claims[0]
