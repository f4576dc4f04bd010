"""The reader of Markdown that the other docs tests rest on."""

from __future__ import annotations

from tests.docs.markdown import anchor, parse

SAMPLE = """\
# A `title`, with marks!

A [link](other.md#part "tip") and `[code](no.md)`.

```python
a = 1
# no heading
```

<!-- no-run: needs a server -->

```python
import nothing
```

1. item

   ```console
   $ ls
   ```
"""


def test_headings_links_and_blocks_are_found() -> None:
    page = parse(SAMPLE)
    assert page.headings == ("A `title`, with marks!",)
    assert page.links == ["other.md#part"]
    assert [(b.language, b.line, b.no_run) for b in page.blocks] == [
        ("python", 6, ""),
        ("python", 13, "needs a server"),
        ("console", 19, ""),
    ]
    assert page.blocks[2].code == "$ ls"


def test_anchor_is_what_a_renderer_makes() -> None:
    assert anchor("A `title`, with marks!") == "a-title-with-marks"
    assert anchor("kvstore_register_backends()") == "kvstore_register_backends"
