"""Moving blocks layer by layer, while the engine computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from kvstore.cache import KVCache
from kvstore.keys import BlockHashKey
from kvstore_vllm.connector_device import DeviceOrder
from kvstore_vllm.connector_layout import LayerPages


class LayerLoad:
    """Fills the pages of one request, the first layers first; one thread runs it, another waits.

    Attributes:
        block_ids: The pages, in block order.
    """

    def __init__(self, block_ids: Sequence[int], n_layers: int) -> None:
        self.block_ids = tuple(block_ids)
        self._n_layers = n_layers
        self._ready = 0
        self._good = 0
        self._over = False
        self._changed = threading.Condition()

    def run(self, cache: KVCache, pages: LayerPages, key: BlockHashKey) -> None:
        """Load what there is; :meth:`end` must follow."""
        if not pages.by_layer:
            self._good = cache.get(key, pages.pages().at(pages.page_ids(self.block_ids)))
            return
        order = DeviceOrder(pages.layers[0].device)
        rows = torch.tensor(self.block_ids, dtype=torch.long, device=pages.layers[0].device)
        good = 0
        for group in cache.stream(key):
            good = group.n_blocks
            for i in range(group.n_layers):
                _scatter(pages.layer_rows(group.first_layer + i), rows[:good], group.tensor[:, i])
            order.finish()  # the engine's stream waits for nothing
            self._publish(group.first_layer + group.n_layers)
        self._good = good if self._ready == self._n_layers else 0

    def end(self) -> None:
        """Nothing more is written; every layer is as ready as it will be."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, layer: int) -> None:
        """Wait until a layer is filled, or the load is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._ready > layer)

    def failed(self) -> tuple[int, ...]:
        """Pages that do not hold their blocks; after :meth:`end`."""
        self.wait_for(self._n_layers)
        return self.block_ids[self._good :]

    def _publish(self, n_layers: int) -> None:
        with self._changed:
            self._ready = n_layers
            self._changed.notify_all()


class LayerCopies:
    """Copies of the pages of one step, taken layer by layer, right after each was computed.

    A layer that is copied again counts as of the last time: its attention may run in several pieces.

    Args:
        pages: The KV tensors; ``by_layer``.
        block_ids: Pages to copy.
    """

    def __init__(self, pages: LayerPages, block_ids: Sequence[int]) -> None:
        first = pages.layers[0]
        self._pages = pages
        self._rows = torch.tensor(block_ids, dtype=torch.long, device=first.device)
        self._copied = [False] * len(pages.layers)
        page = first.movedim(pages.block_dim, 0).shape[1:]
        on_device = first.device.type != "cpu"
        self._blocks = torch.empty(
            (len(block_ids), len(pages.layers), *page), dtype=first.dtype, device="cpu", pin_memory=on_device
        )

    def take(self, layer: int) -> None:
        """Copy one layer; on an accelerator ordered behind what its stream does now."""
        source = _as_storable(self._pages.layer_rows(layer))[self._rows]
        _as_storable(self._blocks)[:, layer].copy_(source, non_blocking=True)
        self._copied[layer] = True

    def blocks(self) -> torch.Tensor:
        """All blocks ``(n, *spec.shape)``, with the layers that nobody announced."""
        for layer, copied in enumerate(self._copied):
            if not copied:
                self.take(layer)
        DeviceOrder(self._pages.layers[0].device).finish()
        spec = self._pages.spec
        return self._blocks.reshape(len(self._rows), *spec.shape)


def _scatter(layer: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write blocks into some rows of ``(blocks, *page)``."""
    values = _as_storable(blocks).reshape(len(rows), *layer.shape[1:])
    _as_storable(layer)[rows] = values.to(layer.device)


def _as_storable(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes: torch cannot index them."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
