"""The options table of the reference is the schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

import kvstore_vllm.metrics
from kvstore_vllm.options import TierOptions

from kvstore.plugins.options import option_fields

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "vllm.md"


def test_the_tier_options_table_is_the_schema() -> None:
    section = REFERENCE.read_text().partition("## Tier options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.+) \|$", section, re.MULTILINE)
    shown = {name: (default, text) for name, default, text in rows}
    expected = {
        option.name: ("none" if option.default is None else f"`{json.dumps(option.default)}`", option.doc)
        for option in option_fields(TierOptions, skip=("config",))
    }
    assert shown.pop("config")[0] == "none"
    assert shown == expected


def test_every_metric_is_explained() -> None:
    text = REFERENCE.read_text()
    for name in (*kvstore_vllm.metrics.COUNTERS, *kvstore_vllm.metrics.GAUGES):
        assert f"| `{name}` |" in text
