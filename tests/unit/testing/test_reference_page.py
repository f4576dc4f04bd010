from __future__ import annotations

import re

import kvstore.testing
from kvstore.testing import BackendConformance, CodecConformance, PolicyConformance
from tests.docs.markdown import page

PAGE = page("docs/reference/testing.md")


def test_every_public_name_has_a_heading() -> None:
    assert [name for name in kvstore.testing.__all__ if name not in PAGE.headings] == []


def test_the_page_lists_the_laws() -> None:
    suites = (BackendConformance, CodecConformance, PolicyConformance)
    laws = {
        name.removeprefix("test_").replace("_", " ") for suite in suites for name in dir(suite) if name[:5] == "test_"
    }
    listed = set(re.findall(r"^- (.*)$", PAGE.prose, re.MULTILINE))
    assert laws - listed == set()
    assert listed - laws == set()


def test_the_page_lists_the_knobs_with_their_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+)(?: MiB| KiB)? \| ", PAGE.prose, re.MULTILINE))
    for name, shown in rows.items():
        if hasattr(BackendConformance, name) and name != "hooks":
            value = getattr(BackendConformance, name)
            assert str(value).lower() in (shown, f"{shown}.0") or value in (int(shown) << 20, int(shown) << 10), name
    assert {"capacity_bytes", "small_capacity_bytes", "record_bytes", "usage_is_exact", "examples"} <= set(rows)
