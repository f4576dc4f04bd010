"""Page-locking the slab: asked for when an accelerator is there, never a reason to fail."""

from __future__ import annotations

import logging

import pytest
import torch

from kvstore.l1 import pinned
from tests.support_l1 import MakeL1

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@without_cuda
def test_a_refusal_is_counted_and_logged_once(make_l1: MakeL1, caplog: pytest.LogCaptureFixture) -> None:
    l1 = make_l1(4)
    with caplog.at_level(logging.WARNING):
        l1.pool.pin()
    assert (l1.counters.pin_refusals, l1.counters.pinned_host_bytes) == (1, 0)
    (record,) = caplog.records
    assert "is not page-locked" in record.getMessage()
    assert "l1.pin" in record.getMessage()
    l1.pool.payload(0)[:] = 1  # usable as before


@without_cuda
def test_a_process_without_cuda_has_no_accelerator_in_use() -> None:
    assert not pinned.accelerator_in_use()


def test_what_was_pinned_is_unpinned_before_it_is_unmapped(make_l1: MakeL1, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int, bool]] = []
    l1 = make_l1(4)

    def mapped() -> bool:
        return l1.pool._map is not None and not l1.pool._map.closed

    def pin(address: int, nbytes: int) -> bool:
        assert nbytes == 4 * l1.pool.stride
        done.append(("pin", address, mapped()))
        return True

    closing = l1.pool._map
    assert closing is not None
    monkeypatch.setattr(pinned, "pin", pin)
    monkeypatch.setattr(pinned, "unpin", lambda address: done.append(("unpin", address, not closing.closed)))
    l1.pool.pin()
    assert l1.counters.pinned_host_bytes == 4 * l1.pool.stride
    start = l1.pool.payload(0).__array_interface__["data"][0] - 4096
    l1.close()
    l1.close()
    assert done == [("pin", start, True), ("unpin", start, True)]
