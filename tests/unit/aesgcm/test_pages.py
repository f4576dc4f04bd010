"""The README and the threat model say what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvstore_aesgcm.options import AesGcmOptions
from kvstore_aesgcm.sealed import SEAL_BYTES

from kvstore.config.schema import text
from kvstore.plugins.options import option_fields

ROOT = Path(__file__).parents[3]
README = (ROOT / "plugins/aesgcm/README.md").read_text(encoding="utf-8")
THREATS = (ROOT / "docs/explanation/threat-model.md").read_text(encoding="utf-8")


def test_the_table_of_options_is_the_schema() -> None:
    table = README.partition("| option | default | meaning |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [f"| `{o.name}` | `{text(o, o.default)}` | {o.doc} |" for o in option_fields(AesGcmOptions)]
    assert table == "\n".join(rows)


def test_the_overhead_is_what_the_page_says() -> None:
    assert f"{SEAL_BYTES} bytes more" in README


def test_every_threat_has_a_test_that_exists() -> None:
    table = THREATS.partition("## Threats")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for _, threat, _, _, tests, _ in rows:
        named = re.findall(r"`([a-z0-9_/]+\.py)`", tests)
        assert named, threat
        for name in named:
            assert (ROOT / "tests" / name).is_file(), name


@pytest.mark.parametrize("option", ["record_keys", "require_salt", "aes-gcm"])
def test_the_page_says_what_each_option_is_for(option: str) -> None:
    assert option in THREATS.partition("## Which options")[2]
