"""Checks on what a plugin hands over, before anything relies on it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, Final, get_args

from kvstore.errors import PluginIncompatibleError, PluginLoadError
from kvstore.plugins.descriptors import (
    PLUGIN_API_VERSION,
    TIER_KEYS,
    Admit,
    BackendPlugin,
    CodecPlugin,
    Descriptor,
    Kind,
    PolicyPlugin,
)
from kvstore.plugins.naming import is_plugin_name
from kvstore.plugins.options import option_fields

REGISTRATION_HOOKS: Final[dict[str, tuple[Kind, type[Any]]]] = {
    "kvstore_register_backends": ("backend", BackendPlugin),
    "kvstore_register_codecs": ("codec", CodecPlugin),
    "kvstore_register_policies": ("policy", PolicyPlugin),
}
"""Registration hook to the kind it registers and the descriptor it must return."""

MAX_CODEC_ID: Final = 0xFFFF  # the record header keeps 16 bits


def check_descriptor(descriptor: object, expected: type[Any], who: str) -> None:
    """Check one descriptor returned by a registration hook.

    Args:
        descriptor: What the hook returned.
        expected: The descriptor type of that hook.
        who: The plugin, for messages.

    Raises:
        PluginIncompatibleError: It was written for another plugin API version.
        PluginLoadError: It is of another type, or one of its fields is unusable.
    """
    if not isinstance(descriptor, expected):
        msg = f"{who} is broken: expected {expected.__name__} descriptors, got {descriptor!r}"
        raise PluginLoadError(msg)
    if descriptor.api_version != PLUGIN_API_VERSION:
        msg = (
            f"{who} is incompatible: {descriptor.name!r} speaks plugin API {descriptor.api_version!r}, "
            f"this kvstore speaks {PLUGIN_API_VERSION}; install a matching version of the plugin or of kvstore"
        )
        raise PluginIncompatibleError(msg)
    for problem in _problems(descriptor):
        msg = f"{who} is broken: {expected.__name__} {descriptor.name!r}: {problem}"
        raise PluginLoadError(msg)


def _problems(descriptor: Descriptor) -> Iterator[str]:
    if not is_plugin_name(descriptor.name):
        yield "the name must be lower-case words and digits joined by '-'"
    if not callable(descriptor.factory):
        yield f"factory {descriptor.factory!r} is not callable"
    summary: object = descriptor.summary
    if not isinstance(summary, str) or not summary.strip() or "\n" in summary:
        yield "summary must be one line of text"
    if isinstance(descriptor, BackendPlugin):
        yield from _backend_problems(descriptor)
    if isinstance(descriptor, CodecPlugin):
        if not _is_count(descriptor.codec_id, 0, MAX_CODEC_ID):
            yield f"codec_id {descriptor.codec_id!r} is not an integer from 0 to {MAX_CODEC_ID}"
        if descriptor.options is not None:
            yield from _options_problems(descriptor.options)


def _backend_problems(plugin: BackendPlugin) -> Iterator[str]:
    yield from _options_problems(plugin.options, TIER_KEYS)
    if plugin.default_admit not in get_args(Admit):
        yield f"default_admit {plugin.default_admit!r} is not one of {', '.join(get_args(Admit))}"
    if not is_plugin_name(plugin.default_codec):
        yield f"default_codec {plugin.default_codec!r} is not a plugin name"
    if plugin.default_deadline_s is not None and not plugin.default_deadline_s > 0:
        yield f"default_deadline_s {plugin.default_deadline_s!r} is not above 0"
    if plugin.default_capacity_bytes is not None and not _is_count(plugin.default_capacity_bytes, 1):
        yield f"default_capacity_bytes {plugin.default_capacity_bytes!r} is not a positive integer"
    if not _is_count(plugin.max_writers, 1):
        yield f"max_writers {plugin.max_writers!r} is not a positive integer"


def _options_problems(options: object, taken: frozenset[str] = frozenset()) -> Iterator[str]:
    if not isinstance(options, type) or not is_dataclass(options):
        yield f"options {options!r} is not a dataclass type"
        return
    if not options.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # no public attribute tells
        yield f"options {options.__name__} must be frozen: @dataclass(frozen=True)"
    try:
        names = {option.name for option in option_fields(options)}
    except TypeError as e:
        yield str(e)
        return
    if names & taken:
        yield f"option {min(names & taken)!r} of {options.__name__} is a key of the core; rename it"


def _is_count(value: object, low: int, high: int | None = None) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return low <= value and (high is None or value <= high)


def interface_problems(made: object, contract: type[Any]) -> Iterator[str]:
    """Yield the methods of ``made`` that cannot be called as ``contract`` declares them."""
    for name, declared in inspect.getmembers(contract, inspect.isfunction):
        if name.startswith("_") and name not in contract.__abstractmethods__:
            continue
        method = getattr(made, name)
        if inspect.iscoroutinefunction(method):
            yield f"{name} is a coroutine function; the contract is synchronous"
            continue
        _, *parameters = inspect.signature(declared).parameters.values()  # without self
        positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(method).bind(*positional, **keywords)
        except TypeError as e:
            shape = ", ".join([*positional, *(f"*, {keyword}" for keyword in keywords)])
            yield f"{name} cannot be called as {name}({shape}): {e}"
