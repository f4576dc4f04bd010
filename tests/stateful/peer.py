"""Another process with caches of its own, told what to do over a pipe, one JSON line a command."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore import BlockSpec, KVCache, Namespace

ROOT = Path(__file__).parents[2]
SPEC = BlockSpec(layers=8, kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16")  # 128 KiB
ANSWER_S = 90.0


class Peer:
    """A process that opens one cache at a time; ``ask`` sends a command and waits for its answer.

    Args:
        wrapper: Command line to run the process under, such as one that changes its mounts.
    """

    def __init__(self, *wrapper: str) -> None:
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.stateful.peer import serve; serve()"
        command = [*wrapper, sys.executable, "-W", "error", "-c", code]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer to the oldest command; a process that hangs is killed and fails the test."""
        assert self.process.stdout is not None
        late = threading.Timer(ANSWER_S, self.process.kill)
        late.start()
        try:
            line = self.process.stdout.readline()
        finally:
            late.cancel()
        assert line, f"the process ended: {self.process.wait(10)}"
        result, error = json.loads(line)
        assert not error, error
        return result

    def answered(self) -> bool:
        """Whether an answer is there, or the process ended."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout.fileno()], [], [], 0.002)[0])

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        self.tell(do, **arguments)
        return self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.process.communicate(timeout=20)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        if kind is None:
            assert self.process.returncode == 0


def serve() -> None:
    """Carry out commands until the input ends."""
    caches = Caches()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = (getattr(caches, command.pop("do"))(**command), "")
        except Exception:  # noqa: BLE001 - fails the test that asked; the process goes on for the others
            answer = (None, traceback.format_exc())
        print(json.dumps(answer), flush=True)
    caches.close()


class Caches:
    """The commands."""

    def __init__(self) -> None:
        self.cache: KVCache | None = None

    def open(self, tier: dict[str, Any]) -> str:
        """Open a cache without L1, so that every hit is the tier's."""
        self.close()
        config = {"l1": {"enabled": False}, "l2": [tier]}
        self.cache = KVCache.open(config, spec=SPEC, namespace=Namespace(model="m", revision="r"))
        return self.cache.health().state

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()
            self.cache = None

    def put(self, seeds: list[int], blocks: int) -> list[int]:
        """Put a chain for each seed and wait until it is stored; returns what was accepted."""
        from tests.support import blocks_of, key_of

        accepted = []
        for seed in seeds:
            accepted.append(
                self._opened.put(key_of("block-hashes", blocks, seed=seed), blocks_of(SPEC, blocks, seed=seed))
            )
            self._opened.flush(60)
        return accepted

    def get(self, seed: int, blocks: int) -> int:
        """Get a chain; returns the blocks found, -1 when one byte of them is wrong."""
        import torch

        from tests.support import blocks_of, key_of, same_bytes

        out = torch.zeros((blocks, *SPEC.shape), dtype=torch.bfloat16)
        found = self._opened.get(key_of("block-hashes", blocks, seed=seed), out)
        return found if same_bytes(out[:found], blocks_of(SPEC, blocks, seed=seed)[:found]) else -1

    def lookup(self, seed: int, blocks: int) -> int:
        from tests.support import key_of

        return self._opened.lookup(key_of("block-hashes", blocks, seed=seed)).blocks

    def clear(self) -> None:
        self._opened.clear()

    def stats(self) -> dict[str, int]:
        (tier,) = self._opened.stats().tiers
        own = {name: getattr(tier, name) for name in ("records", "payload_bytes", "file_bytes", "capacity_bytes")}
        counted = ("hits", "misses", "corrupt", "key_mismatch", "io_errors", "timeouts")
        return own | {name: getattr(tier.counters, name) for name in counted}

    @property
    def _opened(self) -> KVCache:
        assert self.cache is not None
        return self.cache
