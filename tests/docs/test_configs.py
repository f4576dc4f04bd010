"""Every config that a page shows is one that kvstore takes."""

from __future__ import annotations

import tomllib

import pytest

from kvstore.config import effective, load_config
from tests.docs.markdown import ROOT, CodeBlock, pages, parse

SECTIONS = ("[l1]", "[defaults]", "[gate]", "[[l2]]")
FOREIGN = ('backend = "dirfiles"',)  # what a page shows how to write


def configs() -> dict[str, CodeBlock]:
    """TOML blocks with sections of a config, by page and line; other TOML is about packaging."""
    found = {}
    for path in pages():
        for block in parse(path.read_text(encoding="utf-8")).blocks:
            if block.language == "toml" and any(section in block.code for section in SECTIONS):
                found[f"{path.relative_to(ROOT)}:{block.line}"] = block
    return {place: block for place, block in found.items() if not any(name in block.code for name in FOREIGN)}


CONFIGS = configs()


@pytest.mark.parametrize("place", CONFIGS)
def test_a_config_that_a_page_shows_is_valid(place: str) -> None:
    assert effective(load_config(tomllib.loads(CONFIGS[place].code)))


def test_the_how_to_shows_every_backend() -> None:
    shown = [place for place in CONFIGS if place.startswith("docs/how-to/choose-tiers.md")]
    tiers = [tier for place in shown for tier in tomllib.loads(CONFIGS[place].code)["l2"]]
    assert len(shown) >= 5
    assert {tier["backend"] for tier in tiers} == {"lmdb", "nvme", "s3"}
    assert {tier.get("layout") for tier in tiers} == {None, "tree"}
