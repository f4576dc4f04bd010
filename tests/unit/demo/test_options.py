from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvstore import ConfigError
from kvstore.cli.demo import add_arguments
from kvstore.cli.demo.options import DemoOptions, options_of


def parse(*words: str) -> DemoOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_of(parser.parse_args(words))


def test_default_is_the_promise() -> None:
    options = parse()

    assert (options.tokens, options.min_ratio) == (2048, 10.0)


@pytest.mark.parametrize("words", [("--short",), ("--tokens", "500")])
def test_short_document_promises_no_ratio_unless_asked(words: tuple[str, ...]) -> None:
    assert parse(*words).min_ratio == 0.0
    assert parse(*words, "--min-ratio", "2.5").min_ratio == 2.5


@pytest.mark.parametrize("n_tokens", ["0", "199", "8001", "-5"])
def test_tokens_out_of_range_are_refused(n_tokens: str) -> None:
    with pytest.raises(ConfigError, match=f"--tokens is {n_tokens}; expected 200 to 8000"):
        parse("--tokens", n_tokens)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert parse().store == tmp_path / "xdg" / "llm-kvstore" / "demo-store"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert parse().store == tmp_path / "home" / ".cache" / "llm-kvstore" / "demo-store"
