"""Registers hooks modules with pluggy and takes out what they provide."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import pluggy

from kvstore import hookspecs
from kvstore.errors import PluginError, PluginLoadError
from kvstore.plugins.descriptors import Descriptor, Kind
from kvstore.plugins.observers import Observer
from kvstore.plugins.validate import REGISTRATION_HOOKS, check_descriptor

EVENTS_HOOK: Final = "kvstore_events"
OPENED_HOOK: Final = "kvstore_cache_opened"


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A registered hooks module and what it provides.

    Attributes:
        descriptors: By kind and name.
        events: Its observer of block events.
        opened: Its observer of opened caches.
    """

    descriptors: dict[tuple[Kind, str], Descriptor]
    events: Observer | None
    opened: Observer | None

    @property
    def observes(self) -> bool:
        """Whether it wants events or opened caches."""
        return self.events is not None or self.opened is not None

    def kinds(self, name: str) -> tuple[Kind, ...]:
        """Return what ``name`` is; empty when the module neither registers it nor observes."""
        observes: tuple[Kind, ...] = ("observer",) if self.observes else ()
        return tuple(kind for kind, key in self.descriptors if key == name) + observes

    def summary(self, name: str) -> str:
        """Return the one-line summaries of ``name``."""
        return "; ".join(descriptor.summary for (_, key), descriptor in self.descriptors.items() if key == name)


class HooksHost:
    """The one place that talks to pluggy.

    Not thread-safe: the registry calls it under its lock.
    """

    def __init__(self) -> None:
        self._pluggy: Final = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)

    def register(self, module: ModuleType, who: str) -> LoadedModule:
        """Register ``module`` and collect what it provides; all of it or, on an error, nothing.

        Args:
            module: With functions marked as hook implementations.
            who: The plugin, for messages.

        Raises:
            PluginIncompatibleError: A descriptor speaks another plugin API version.
            PluginLoadError: A hook is misspelt, asks for parameters it cannot have, raises or
                returns something unusable.
        """
        try:
            try:
                self._pluggy.register(module, name=module.__name__)
                # register() accepts hooks of any name and just never calls the misspelt ones.
                self._pluggy.check_pending()
            except Exception as e:  # border: register() evaluates every public attribute of the module
                msg = f"{who} is broken: {e}; hooks: {', '.join(hook_names())}"
                raise PluginLoadError(msg) from e
            return self._collect(module, who)
        except PluginError:
            # pluggy 1.6 keeps a plugin that failed validation half registered.
            if self._pluggy.has_plugin(module.__name__):
                self._pluggy.unregister(name=module.__name__)
            raise

    def unregister(self, module: ModuleType) -> None:
        """Undo :meth:`register`."""
        self._pluggy.unregister(name=module.__name__)

    def _collect(self, module: ModuleType, who: str) -> LoadedModule:
        hooks = {
            hook.name: self._implementation(hook, module, who) for hook in self._pluggy.get_hookcallers(module) or ()
        }
        if not hooks:
            msg = f"{who} is broken: {module.__name__} implements no hook; hooks: {', '.join(hook_names())}"
            raise PluginLoadError(msg)
        descriptors: dict[tuple[Kind, str], Descriptor] = {}
        for hook_name, (kind, expected) in REGISTRATION_HOOKS.items():
            if hook_name not in hooks:
                continue
            for descriptor in _results(hooks[hook_name], hook_name, who):
                check_descriptor(descriptor, expected, who)
                if (kind, descriptor.name) in descriptors:
                    msg = f"{who} is broken: {hook_name} returns {descriptor.name!r} twice"
                    raise PluginLoadError(msg)
                descriptors[kind, descriptor.name] = descriptor
        return LoadedModule(descriptors, _observer(hooks, EVENTS_HOOK, who), _observer(hooks, OPENED_HOOK, who))

    def _implementation(self, hook: pluggy.HookCaller, module: ModuleType, who: str) -> pluggy.HookImpl:
        found = next(impl for impl in hook.get_hookimpls() if impl.plugin is module)
        problem = ""
        if found.wrapper or found.hookwrapper:
            problem = "is a hook wrapper; kvstore calls plain functions only"
        elif inspect.iscoroutinefunction(found.function):
            problem = "is a coroutine function; hooks are synchronous"
        elif any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(found.function).parameters.values()):
            problem = "has keyword-only parameters; hooks get theirs by position"
        elif found.kwargnames:
            problem = f"gives {found.kwargnames[0]!r} a default value, so it would never be filled; remove the default"
        if problem:
            msg = f"{who} is broken: {hook.name} {problem}"
            raise PluginLoadError(msg)
        return found


def hook_names() -> list[str]:
    """List the hooks that a plugin may implement."""
    return sorted(name for name in vars(hookspecs) if name.startswith("kvstore_"))


def _results(implementation: pluggy.HookImpl, hook_name: str, who: str) -> list[Descriptor]:
    """Call one registration hook; the border between the host and the plugin's code."""
    try:
        results: object = implementation.function()
        if isinstance(results, Iterable):
            return list(results)  # here, because a generator function raises only when it is iterated
    except Exception as e:
        msg = f"{who} is broken: {hook_name} raised {type(e).__name__}: {e}"
        raise PluginLoadError(msg) from e
    msg = f"{who} is broken: {hook_name} returned {results!r}, expected a list of descriptors"
    raise PluginLoadError(msg)


def _observer(hooks: dict[str, pluggy.HookImpl], hook_name: str, who: str) -> Observer | None:
    implementation = hooks.get(hook_name)
    if implementation is None:
        return None
    return Observer(f"{hook_name} of {who}", implementation.function, takes_argument=bool(implementation.argnames))
