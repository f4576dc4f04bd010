"""What a prompt takes with the gate, without it, and without a cache, over fast, slow and changing tiers.

    python benchmarks/bench_gate.py [--prompts 120] [--blocks 32] [--prefill-tokens-per-s 20000]

The engine is simulated: computing sleeps for a stated time per token.  So are the media: memory that takes
a stated time per block.  Everything else, the cache and its gate, is real.  Each prompt is looked up, loaded
as far as the cache says, and the rest is computed.  The four ways take turns, prompt by prompt, so that a
machine whose speed drifts moves all of them; figures are sums over all prompts, and ratios are to computing
every prompt in the same run.

A declined tier is looked at again every 0.25 s here instead of every 5 s, because these prompts take a
twentieth of what real ones do.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch

from kvstore import BlockSpec, KVCache, KVCacheKey, Namespace, Registry, hookimpl
from kvstore import gate as gate_module
from kvstore.backend import Receive
from kvstore.memory_backend import MemoryBackend
from kvstore.plugins import BackendPlugin
from kvstore.types import Call, ReadStatus

SPEC: Final = BlockSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
FAST: Final = 0.1  # of the time to compute a block
SLOW: Final = 3.0
WAYS: Final = ("recompute", "gate off", "gate on", "gate, speed learned")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The medium takes none."""


class TimedMemory(MemoryBackend):
    """Memory that takes ``block_s`` seconds for each record that it hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.block_s = 0.0

    def get_many(self, names: Sequence[bytes], receive: Receive, call: Call) -> list[ReadStatus]:
        """Wait for the records that are there, then read them."""
        time.sleep(self.block_s * sum(name in self._records for name in names))
        return super().get_many(names, receive, call)


def registry_of(medium: TimedMemory) -> Registry:
    """A registry in which ``timed`` stands for the medium."""
    module = ModuleType("timed")

    @hookimpl
    def kvstore_register_backends() -> list[BackendPlugin]:
        return [BackendPlugin(name="timed", options=NoOptions, factory=lambda: medium, summary="Memory that waits.")]

    module.kvstore_register_backends = kvstore_register_backends  # type: ignore[attr-defined]
    registry = Registry.discover()
    registry.register(module, "timed")
    return registry


@dataclass
class Engine:
    """One way to serve prompts.

    Attributes:
        cache: None computes everything.
        medium: Behind the cache.
        token_s: Seconds to compute a token.
        learns: Whether the cache is told what prefills take.
    """

    cache: KVCache | None
    medium: TimedMemory
    token_s: float
    learns: bool = False

    def serve(self, key: KVCacheKey, out: torch.Tensor) -> float:
        """Seconds until the prompt's KV is there."""
        began = time.perf_counter()
        loaded = 0
        if self.cache is not None and (found := self.cache.lookup(key).blocks):
            loaded = self.cache.get(key.prefix(found), out[:found])
        rest = (len(key) - loaded) * SPEC.block_tokens
        computing = time.perf_counter()
        time.sleep(rest * self.token_s)
        if self.learns and self.cache is not None and rest:
            self.cache.note_prefill(rest, time.perf_counter() - computing, context_tokens=loaded * SPEC.block_tokens)
        return time.perf_counter() - began


def open_engines(key: KVCacheKey, tokens_per_s: float) -> Iterator[Engine]:
    """One engine for each way, the key's blocks stored."""
    gates: tuple[dict[str, Any] | None, ...] = (
        None,
        {"enabled": False},
        {"prefill_tokens_per_s": tokens_per_s},
        {},
    )
    for gate in gates:
        medium = TimedMemory()
        if gate is None:
            yield Engine(None, medium, 1.0 / tokens_per_s)
            continue
        config = {"l1": {"enabled": False}, "gate": gate, "l2": [{"backend": "timed"}]}
        namespace = Namespace(model="bench", revision="r1")
        cache = KVCache.open(config, spec=SPEC, namespace=namespace, registry=registry_of(medium))
        cache.put(key, torch.zeros((len(key), *SPEC.shape), dtype=SPEC.torch_dtype()))
        cache.flush(20)
        yield Engine(cache, medium, 1.0 / tokens_per_s, learns=not gate)


def bench(name: str, args: argparse.Namespace, factor: Callable[[float], float]) -> None:
    """Serve all prompts in every way; ``factor`` gives the medium's time per block, in times to compute one."""
    tokens_per_s: float = args.prefill_tokens_per_s
    n_tokens = args.blocks * SPEC.block_tokens
    key = KVCacheKey.from_tokens(range(n_tokens), block_tokens=SPEC.block_tokens)
    unseen = [KVCacheKey.from_tokens(range(i, i + n_tokens), block_tokens=SPEC.block_tokens) for i in range(1, 4)]
    out = torch.zeros((args.blocks, *SPEC.shape), dtype=SPEC.torch_dtype())
    engines = list(open_engines(key, tokens_per_s))
    sums = [0.0] * len(engines)
    for engine in engines:  # a cold prompt each, from which a speed can be learned
        for one in unseen:
            engine.serve(one, out)
    for i in range(args.prompts):
        for way, engine in enumerate(engines):
            engine.medium.block_s = factor(i / args.prompts) * SPEC.block_tokens / tokens_per_s
            sums[way] += engine.serve(key, out)
    for label, total, engine in zip(WAYS, sums, engines, strict=True):
        gated = 0
        if engine.cache is not None:
            gated = engine.cache.stats().tiers[0].counters.gated
            engine.cache.close()
        print(f"{name:<10} {label:<20}{total:8.2f} s   ratio {total / sums[0]:5.2f}   {gated:6,} blocks declined")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=120, help="prompts of each way (120)")
    parser.add_argument("--blocks", type=int, default=32, help="blocks of a prompt, of 16 tokens (32)")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=20_000, help="of the engine (20000)")
    args = parser.parse_args()
    gate_module.PROBE_S = 0.25  # type: ignore[misc]  # see above
    print(f"{platform.machine()}, Python {platform.python_version()}, {args.blocks} blocks a prompt")
    print(f"a tier is fast at {FAST:g} and slow at {SLOW:g} times the time to compute")
    bench("fast", args, lambda _: FAST)
    bench("slow", args, lambda _: SLOW)
    bench("changing", args, lambda at: SLOW if 1 / 3 <= at < 2 / 3 else FAST)


if __name__ == "__main__":
    main()
