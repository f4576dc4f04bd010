"""Whatever is measured in between: sums are right, bytes are right, and what was promised comes."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore import gate as gate_module
from tests.support import blocks_of, key_of, same_bytes
from tests.unit.gate.distant import SPEC, DistantBackend, DistantMemory, Open
from tests.unit.gate.test_gated_reads import check_sums

KEYS = 6
LONGEST = 12


@pytest.mark.parametrize("l1", [None, {"capacity": "80KiB"}], ids=["no L1", "L1 of a few blocks"])
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_calls_keeps_the_laws(
    open_cache: Open, seed: int, l1: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "PROBE_S", 0.002)
    chance = random.Random(seed)
    gated = open_cache(DistantMemory(), DistantBackend(), gate={"prefill_tokens_per_s": 1e4}, l1=l1)
    cache, blocks = gated.cache, {}
    for number in range(KEYS):
        blocks[number] = blocks_of(SPEC, LONGEST, seed=number)
        cache.put(key_of("tokens", LONGEST, seed=number), blocks[number])
    cache.flush(20)
    for _ in range(120):
        number, n_blocks = chance.randrange(KEYS), chance.randint(1, LONGEST)
        key, out = key_of("tokens", LONGEST, seed=number).prefix(n_blocks), torch.zeros((n_blocks, *SPEC.shape))
        out = out.to(SPEC.torch_dtype())
        told = cache.lookup(key).blocks if chance.random() < 0.5 else 0
        if chance.random() < 0.5:
            block_s = chance.choice([1e-5, 1.0])
            gated.learn(chance.randrange(2), *[(1, block_s), (LONGEST, LONGEST * block_s)] * 4)
        got = cache.get(key, out)
        assert got >= told
        assert same_bytes(out[:got], blocks[number][:got])
        assert not out[got:].view(torch.uint8).any()
        check_sums(gated)
    assert sum(gated.counters(tier).gated for tier in range(2)) > 0
    assert cache.stats().cache.hits > 0
