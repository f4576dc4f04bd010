"""Which blocks of a key are there, all of them exact: compared by numpy, since torch's threads wait for busy cores."""

from __future__ import annotations

import numpy as np
import torch

from kvstore import BlockStatus, KVCacheKey
from tests.support_faults import UNTOUCHED, WatchedCache


def delivered(cache: WatchedCache, key: KVCacheKey, blocks: torch.Tensor) -> list[bool]:
    """Get each block; what is delivered must equal ``blocks``, and where nothing is, nothing may be written."""
    expected = blocks.view(torch.uint8).numpy().reshape(len(key), cache.cache.spec.nbytes)
    raw = np.full_like(expected, UNTOUCHED)
    out = torch.from_numpy(raw).view(blocks.dtype).view(blocks.shape)
    there = [status is BlockStatus.DELIVERED for status in cache.get_each(key, out)]
    for i, here in enumerate(there):
        wrong = raw[i] != (expected[i] if here else UNTOUCHED)
        assert not wrong.any(), f"wrong bytes in block {i} of {key}, delivered: {here}"
    return there
