"""Layers of random pages, caches over L1 and LMDB, and an accelerator that is host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import BlockSpec, KVCache, Namespace, paged_device
from kvstore.l1 import device_cache, streams
from kvstore.l1.streams import InlineLane, Lane, Mark, Pairs, Stage

OpenPaged = Callable[..., KVCache]
HOST = torch.device("cpu")


class _Arrival(Mark):
    """Copies that happen when they are waited for, as late as a real transfer may."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = list(pairs)

    def done(self) -> bool:
        return not self._pairs

    def wait(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)
        self._pairs.clear()


class LateLane(InlineLane):
    """Transfers happen at the latest moment; stages come back full of other bytes."""

    def __init__(self, device: torch.device, *, direct: bool = False) -> None:
        super().__init__(device, direct=direct)
        self._coming: list[_Arrival] = []

    def down(self, pairs: Pairs) -> Mark:
        return _Arrival(pairs)

    def up(self, pairs: Pairs, after: Mark | None) -> Mark:
        assert after is None or after.done()
        self._coming.append(_Arrival(pairs))
        return self._coming[-1]

    def work(self) -> AbstractContextManager[None]:
        while self._coming:
            self._coming.pop().wait()
        return nullcontext()

    def give_back(self, stage: Stage) -> None:
        assert stage.free is None or stage.free.done()
        stage.near.fill_(0xEE)
        stage.host.fill_(0xEE)
        super().give_back(stage)


LANES: dict[str, Callable[[], Lane | None]] = {
    "host": lambda: None,
    "staged": lambda: InlineLane(HOST),
    "direct": lambda: InlineLane(HOST, direct=True),
    "late": lambda: LateLane(HOST),
    "late-direct": lambda: LateLane(HOST, direct=True),
}


@pytest.fixture
def use_lane(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Host tensors count as an accelerator's, whose copies behave as the named lane says."""

    def use(name: str) -> None:
        lane = LANES[name]()
        monkeypatch.setattr(streams, "lane_of", lambda _: lane)
        monkeypatch.setattr(device_cache, "resolve_device", lambda _: HOST)
        monkeypatch.setattr(streams, "STAGE_BYTES", 1 << 16)
        monkeypatch.setattr(paged_device, "STAGE_BYTES", 1 << 16)

    return use


@pytest.fixture(params=list(LANES))
def lane(request: pytest.FixtureRequest, use_lane: Callable[[str], None]) -> str:
    name: str = request.param
    use_lane(name)
    return name


@pytest.fixture
def open_paged(tmp_path: Path) -> Iterator[OpenPaged]:
    """``open_paged(spec, l1=..., tiers=...)``: a cache, over LMDB when tiers is True."""
    opened: list[KVCache] = []

    def open_one(spec: BlockSpec, *, tiers: bool = False, **l1: Any) -> KVCache:
        config: dict[str, Any] = {"l1": {"capacity": "4MiB"} | l1}
        if tiers:
            config["l2"] = [{"backend": "lmdb", "path": str(tmp_path / "store"), "capacity": "64MiB"}]
        opened.append(KVCache.open(config, spec=spec, namespace=Namespace(model="test/model", revision="r1")))
        return opened[-1]

    yield open_one
    for cache in opened:
        cache.close()
