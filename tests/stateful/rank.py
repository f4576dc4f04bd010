"""One rank of a tensor-parallel group: a process that is told what to do, like its peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from kvstore import BlockSpec, HeadCache, KVCache, Namespace
from tests.stateful.peer import ROOT, Peer
from tests.support import blocks_of, key_of, same_bytes
from tests.support_s3 import free_ports

HEADS = 8
WHOLE = BlockSpec(layers=4, kv_heads=HEADS, head_dim=64, block_tokens=16, dtype="bfloat16")
DEADLINE_S = 3.0
JOIN_S = 60.0


class Rank(Peer):
    """A process of its own with a cache of some heads."""

    def __init__(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.stateful.rank import serve; serve()"
        command = [sys.executable, "-c", code]
        env = os.environ | {"OMP_NUM_THREADS": "1"}  # torch's own threads only get into each other's way
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def all_ask(ranks: Sequence[Rank], do: str, **arguments: Any) -> list[Any]:
    """Send one command to every rank at once and collect the answers."""
    for rank in ranks:
        rank.tell(do, **arguments)
    return [rank.answer() for rank in ranks]


def form(ranks: Sequence[Rank]) -> None:
    """Make the ranks one group."""
    (port,) = free_ports(1)
    for number, rank in enumerate(ranks):
        rank.tell("join", port=port, rank=number, size=len(ranks))
    for rank in ranks:
        rank.answer()


def whole_blocks(seed: int, n_blocks: int) -> torch.Tensor:
    """Blocks of all heads of the model; the same in every process."""
    return blocks_of(WHOLE, n_blocks, seed=seed)


def heads_of(blocks: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
    """The part of whole blocks that a rank holds."""
    axis = 1 + WHOLE.axes.index("H")
    return blocks.narrow(axis, heads[0], heads[1] - heads[0]).contiguous()


class Commands:
    """What a rank can be told."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.cache: KVCache | HeadCache | None = None

    @property
    def heads(self) -> tuple[int, int]:
        each = HEADS // self.size
        return self.rank * each, (self.rank + 1) * each

    def join(self, port: int, rank: int, size: int) -> None:
        """Leave the old group and form one with others."""
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.rank, self.size = rank, size
        store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=JOIN_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def open(self, tier: dict[str, Any], l1: bool = True, stored: Any = None) -> str:
        """Open a cache of this rank's heads; ``stored`` says for each rank how they are stored."""
        import torch.distributed as dist

        self.close()
        first, stop = self.heads
        spec = BlockSpec(**{**_fields(WHOLE), "kv_heads": stop - first})
        namespace = Namespace(model="m", revision="r", kv_heads=(first, stop), rank=self.rank, world_size=self.size)
        config = {
            "defaults": {"deadline": f"{DEADLINE_S}s"},
            "l1": {"capacity": "16MiB"} if l1 else {"enabled": False},
            "l2": [tier],
        }
        group = dist.group.WORLD if self.size > 1 else None
        if stored is None:
            self.cache = KVCache.open(config, spec=spec, namespace=namespace, group=group)
            return self.cache.health().state
        ranges = [tuple(heads) for heads in stored[self.rank]]
        self.cache = HeadCache.open(config, spec=spec, namespace=namespace, stored_heads=ranges, group=group)
        return max(health.state for health in self.cache.health().values())

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()
            self.cache = None

    def put(self, seed: int, blocks: int) -> int:
        accepted = self._open.put(key_of("tokens", blocks, seed=seed), heads_of(whole_blocks(seed, blocks), self.heads))
        self._open.flush(30)
        return accepted

    def get(self, seed: int, blocks: int) -> int:
        """Blocks found; -1 when a byte of them is wrong, -2 when something behind them changed."""
        expected = heads_of(whole_blocks(seed, blocks), self.heads)
        out = torch.full_like(expected, 7.0)
        untouched = out.clone()
        n = self._open.get(key_of("tokens", blocks, seed=seed), out)
        if not same_bytes(out[:n], expected[:n]):
            return -1
        return n if same_bytes(out[n:], untouched[n:]) else -2

    def timed_get(self, seed: int, blocks: int) -> tuple[int, float]:
        began = time.monotonic()
        return self.get(seed, blocks), time.monotonic() - began

    def each(self, seed: int, blocks: int) -> list[str]:
        out = torch.empty_like(heads_of(whole_blocks(seed, blocks), self.heads))
        return [status.value for status in self._open.get_each(key_of("tokens", blocks, seed=seed), out)]

    def lookup(self, seed: int, blocks: int) -> int:
        return self._open.lookup(key_of("tokens", blocks, seed=seed)).blocks

    def delete(self, seed: int, blocks: int, at: int) -> int:
        return self._open.delete(key_of("tokens", blocks, seed=seed)[at : at + 1])

    def state(self) -> list[Any]:
        """Health, failures and mismatches of the group."""
        assert isinstance(self._open, KVCache)
        group = self._open.stats().group
        assert group is not None
        return [self._open.health().state, group.failures, group.mismatches]

    def cost(self, questions: int) -> float:
        """Microseconds that a lookup takes more than alone, the best of several rounds."""
        assert isinstance(self._open, KVCache)
        key = key_of("tokens", 4, seed=99)
        state = self._open._use(key)
        alone: Callable[..., Any] = state.reads._reads.lookup  # type: ignore[union-attr]
        times = []
        for call in (self._open.lookup, alone):
            rounds = []
            for _ in range(5):
                began = time.perf_counter()
                for _ in range(questions):
                    call(key)
                rounds.append((time.perf_counter() - began) / questions * 1e6)
            times.append(min(rounds))
        return times[0] - times[1]

    @property
    def _open(self) -> KVCache | HeadCache:
        assert self.cache is not None
        return self.cache


def _fields(spec: BlockSpec) -> dict[str, Any]:
    names = ("layers", "kv_heads", "head_dim", "block_tokens", "dtype", "layout")
    return {name: getattr(spec, name) for name in names}


def serve() -> None:
    """Carry out commands until the input ends."""
    commands = Commands()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = (getattr(commands, command.pop("do"))(**command), "")
        except Exception:  # noqa: BLE001 - fails the test that asked
            answer = (None, traceback.format_exc())
        print(json.dumps(answer), flush=True)
    commands.close()
