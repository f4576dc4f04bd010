"""The power fails at any moment: what the medium kept is served exactly, and what was promised to be kept is there."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Rounds
from tests.faults.exact import delivered
from tests.faults.media import MEDIA
from tests.faults.power_model import Event, Kind, Loss, Medium, events_of
from tests.faults.power_writer import CAPACITY, CHAINS, blocks_of, key_of
from tests.faults.process import Forge
from tests.faults.store import Store, over

RECORDER = Path(__file__).with_name("power_recorder.c")
OPEN_S = 10.0  # what KVCache.open itself allows; alone it takes a tenth of a second
WRITER = "from tests.faults.power_writer import live; live(STORE, *ARGS)"


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Makes processes whose file operations are written down."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to build the library that writes down file operations")
    library = tmp_path_factory.mktemp("recorder") / "power_recorder.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(RECORDER)], check=True)
    forge = Forge(library)
    yield forge
    forge.close()


@pytest.fixture(autouse=True)
def another_machine_for_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of temporaries tell the boot of their writer, which is over."""
    monkeypatch.setattr("kvstore_nvme.tree_temporaries._machine", lambda: "0" * 16)


@dataclass
class Promised:
    """What a cache may and must hold, from the marks before the cut."""

    stored: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)
    cleared: bool = False

    def take(self, mark: dict[str, Any]) -> None:
        if "stored" in mark:
            self.stored.add(mark["stored"])
        if "deleting" in mark:
            self.stored.discard(mark["deleting"])
        if "deleted" in mark:
            self.deleted.add(mark["deleted"])
        if "clearing" in mark:
            self.stored.clear()
        if "cleared" in mark:
            self.cleared = True


@dataclass
class Report:
    images: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    undone: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def text(self) -> str:
        return (
            f"{sum(self.images.values())} images {dict(self.images)}; stored blocks that were lost {dict(self.lost)}; "
            f"deletes and clears undone {dict(self.undone)}; opened in {1e3 * self.slowest_s:.0f} ms at most; wrong 0"
        )


class Cuts:
    """Power cuts at points of one recorded life."""

    def __init__(self, store: Store, durability: str, folder: Path) -> None:
        self.store, self.durability, self.folder = store, durability, folder
        self.rng = random.Random(f"{store.kind} {durability}")
        self.report = Report()

    def run(self, events: list[Event], cuts: int) -> None:
        changes = [i for i, event in enumerate(events) if event.kind is not Kind.MARK]
        marks = [i for i, event in enumerate(events) if event.kind is Kind.MARK]
        chosen = sorted([*self.rng.choices(changes, k=cuts - cuts // 3), *self.rng.choices(marks, k=cuts // 3)])
        medium, promised = Medium(self.store.root), Promised()
        at = 0
        for n, point in enumerate(chosen):
            for event in events[at : point + 1]:
                medium.take(event)
                if event.kind is Kind.MARK:
                    promised.take(json.loads(event.text))
            at = point + 1
            self.cut(medium, promised, list(Loss)[n % len(Loss)], n)

    def cut(self, medium: Medium, promised: Promised, loss: Loss, n: int) -> None:
        image = self.folder / f"image-{n}"
        medium.leave(image, loss, self.rng)
        store = MEDIA[self.store.kind](image)
        began = time.monotonic()
        with store.open(capacity=CAPACITY, durability=self.durability) as cache:
            took_s = time.monotonic() - began
            assert took_s < OPEN_S, (loss, n)
            self.report.slowest_s = max(self.report.slowest_s, took_s)
            whole = {i for i in range(CHAINS + 3) if all(delivered(cache, key_of(i), blocks_of(i)))}
            self.judge(promised, whole, loss, n)
            cache.store(key_of(99), blocks_of(99))
            assert all(delivered(cache, key_of(99), blocks_of(99))), (loss, n)
        store.close()
        shutil.rmtree(image)

    def judge(self, promised: Promised, whole: set[int], loss: Loss, n: int) -> None:
        self.report.images[loss.name] += 1
        lost = promised.stored - whole
        self.report.lost[loss.name] += len(lost)
        if self.durability == "durable" or loss is Loss.KEPT:
            assert not lost, f"cut {n}, {loss}: chains {sorted(lost)} were stored and are lost"
        gone = promised.deleted | (set(range(CHAINS)) if promised.cleared else set())
        back = gone & whole
        self.report.undone[loss.name] += len(back)
        if loss is Loss.KEPT:
            assert not back, f"cut {n}: chains {sorted(back)} were deleted and are there"
        if promised.cleared and self.durability == "durable":
            assert not set(range(CHAINS)) & whole, f"cut {n}, {loss}: {sorted(whole)} were cleared and are there"


@pytest.mark.parametrize("durability", ["durable", "cache"])
@over("LNT")
def test_after_a_power_cut_blocks_are_exact_and_durable_ones_are_there(
    store: Store, durability: str, recorder: Forge, tmp_path: Path, rounds: Rounds
) -> None:
    log = tmp_path / "log"
    assert recorder.work(WRITER, store, log, durability) == "over"
    events = list(events_of(log))
    kinds = Counter(event.kind for event in events)
    assert kinds[Kind.WRITE] > CHAINS, kinds
    cuts = Cuts(store, durability, tmp_path)
    cuts.run(events, rounds(25, 400))
    print(f"\n{store.kind}, {durability}: {len(events)} operations, {cuts.report.text()}")
