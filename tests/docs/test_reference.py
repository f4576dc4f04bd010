"""Whatever a user can name has a place in the reference."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass

import pytest

from kvstore import errors, hookspecs
from kvstore.cli.main import build_parser
from kvstore.config import DefaultsConfig, GateConfig, L1Config, TierConfig
from kvstore.errors import CORRUPT_REASONS, KVStoreError
from kvstore.plugins import TIER_KEYS, Registry
from tests.docs.markdown import Page, page

OWN_BACKENDS = ("memory", "lmdb")


def has_heading(document: Page, name: str) -> bool:
    return any(name in heading.replace("`", " ").replace("(", " ").split() for heading in document.headings)


def hook_names() -> list[str]:
    return [name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("kvstore_")]


def error_names() -> list[str]:
    return [name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KVStoreError)]


def config_keys() -> list[str]:
    keys = [f"l1.{field.name}" for field in dataclasses.fields(L1Config)]
    keys += [f"defaults.{field.name}" for field in dataclasses.fields(DefaultsConfig)]
    keys += [f"gate.{field.name}" for field in dataclasses.fields(GateConfig)]
    keys += [f"l2.{field.name}" for field in dataclasses.fields(TierConfig) if field.name in TIER_KEYS]
    for name in OWN_BACKENDS:
        options = Registry.discover().backend(name).options
        assert is_dataclass(options)
        keys += [f"{name}.{field.name}" for field in dataclasses.fields(options)]
    return keys


def commands(parser: argparse.ArgumentParser, prefix: str = "kvstore") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that runs, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, f"{prefix} {name}")
            return
    yield prefix, parser


COMMANDS = dict(commands(build_parser()))


@pytest.mark.parametrize("name", hook_names())
def test_every_hook_has_a_heading(name: str) -> None:
    assert has_heading(page("docs/reference/hooks.md"), name)


@pytest.mark.parametrize("name", error_names())
def test_every_error_has_a_heading(name: str) -> None:
    assert has_heading(page("docs/reference/errors.md"), name)


@pytest.mark.parametrize("reason", CORRUPT_REASONS)
def test_every_corrupt_reason_is_explained(reason: str) -> None:
    assert f"\n| `{reason}` |" in page("docs/reference/errors.md").prose


@pytest.mark.parametrize("key", config_keys())
def test_every_config_key_has_an_entry(key: str) -> None:
    document = page("docs/reference/config.md")
    name = key.partition(".")[2]
    assert has_heading(document, key) or has_heading(document, name) or f"| `{name}`" in document.prose


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_heading(name: str) -> None:
    assert name in [heading.replace("`", "") for heading in page("docs/reference/cli.md").headings]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_in_its_section(name: str) -> None:
    text = page("docs/reference/cli.md").prose
    section = text.partition(f"## `{name}`\n")[2].partition("\n## ")[0]
    common = {"--help", "--json", "--debug", "-h"}
    options = {option for action in COMMANDS[name]._actions for option in action.option_strings} - common
    assert sorted(option for option in options if f"`{option}" not in section) == []


def test_the_lists_are_not_empty() -> None:
    assert len(hook_names()) >= 5
    assert len(error_names()) >= 19
    assert len(config_keys()) >= 15
    assert {
        "kvstore demo",
        "kvstore init",
        "kvstore config check",
        "kvstore plugins list",
        "kvstore verify",
    } <= COMMANDS.keys()


def test_a_missing_heading_is_noticed() -> None:
    assert not has_heading(page("docs/reference/errors.md"), "NoSuchError")
