"""Every fuzz target: a function from bytes to None that breaks a law by raising.

The same functions run under hypothesis (``test_*.py`` here), under atheris (``run_atheris.py``) and over
the corpus.  To add one: write the function, give it seeds, enter it in :data:`TARGETS`.
"""

from __future__ import annotations

import functools
import importlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz import hostile_keys, hostile_media, hostile_records, hostile_text, repair, seeds

CORPUS: Final = Path(__file__).parent / "corpus"
TIME_LIMIT_S: Final = 20.0
"""One input may take so long on a busy machine; the slowest sound one takes 0.05 s on an idle one."""

Mutate = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """One thing to fuzz.

    Attributes:
        name: Also the folder of its corpus.
        law: Raises where the law breaks.
        seeds: Sound inputs to start from.
        mutate: Damage that gets past the first checks: pieces of syntax, numbers with the checksum made right.
    """

    name: str
    law: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    mutate: Mutate

    def __call__(self, data: bytes) -> None:
        """Check the law, and that it did not take for ever."""
        _import_late(self.name)
        began = time.monotonic()
        self.law(data)
        seconds = time.monotonic() - began
        assert seconds < TIME_LIMIT_S, f"{self.name}: {seconds:.1f} s for {len(data)} bytes"

    def corpus(self) -> list[Path]:
        """Inputs that once broke the law or reached code that nothing else did."""
        return sorted((CORPUS / self.name).glob("*"))

    def inputs(self) -> list[bytes]:
        """Seeds and corpus."""
        return [*self.seeds(), *(path.read_bytes() for path in self.corpus())]


@functools.cache
def _import_late(name: str) -> None:
    """Import what one target alone needs, off the clock: torch takes its time on a busy machine."""
    if name == "notes":
        importlib.import_module("kvstore_lmcache.layout")


def _breakable(data: bytes) -> None:
    assert data[:1] != b"!", "a law that some bytes break"


SELF_TEST: Final = Target("self-test", _breakable, lambda: [b" "], repair.plain)
"""Shows that a broken law is noticed; not among the targets."""

TARGETS: Final = {
    target.name: target
    for target in (
        Target("record", hostile_records.record, seeds.records, repair.record),
        Target("codec", hostile_media.coded, seeds.coded, repair.coded),
        Target("config", hostile_text.config, seeds.config, repair.text),
        Target("namespace", hostile_text.namespace, seeds.namespace, repair.text),
        Target("key-source", hostile_text.key_source, seeds.key_source, repair.text),
        Target("notes", hostile_text.notes, seeds.notes, repair.text),
        Target("keys", hostile_keys.keys, seeds.keys, repair.plain),
        Target("pack", hostile_media.packs, seeds.packs, repair.pack),
        Target("slot", hostile_media.slots, seeds.slots, repair.slot),
        Target("lmdb-file", hostile_media.lmdb_files, seeds.lmdb_files, repair.lmdb_file),
        Target("archive", hostile_media.archives, seeds.archives, repair.archive),
        Target("answer", hostile_media.answers, seeds.answers, repair.text),
        Target("names", hostile_media.names, seeds.names, repair.plain),
    )
}


def find(name: str) -> Target:
    """A target by name, :data:`SELF_TEST` among them.

    Raises:
        KeyError: There is none.
    """
    return {**TARGETS, SELF_TEST.name: SELF_TEST}[name]
