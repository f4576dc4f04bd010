"""Host pools with SGLang's interface and memory layouts, in plain torch; the real ones are in tests/engines/sglang."""

from __future__ import annotations

from typing import Any

import torch

PAGE = 4  # tokens
LAYERS, HEADS, DIM = 2, 3, 8


class MhaPool:
    """K and V of every head, as in ``MHATokenToKVPoolHost``."""

    def __init__(self, layout: str = "page_first", *, n_pages: int = 8, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = LAYERS, HEADS, DIM, DIM
        self.start_layer, self.end_layer = 0, LAYERS
        sizes = {
            "layer_first": (2, LAYERS, n_pages * PAGE, HEADS, DIM),
            "page_first": (2, n_pages * PAGE, LAYERS, HEADS, DIM),
            "page_first_direct": (2, n_pages, LAYERS, PAGE, HEADS, DIM),
            "page_head": (2, n_pages, HEADS, PAGE, LAYERS, DIM),
        }
        self.kv_buffer = torch.empty(sizes[layout], dtype=dtype)
        scramble(self.kv_buffer, seed=1)

    @property
    def memory(self) -> torch.Tensor:
        return self.kv_buffer

    def _page(self, index: int) -> torch.Tensor:
        index = int(index)
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, index : index + PAGE]
        if self.layout == "page_first":
            return self.kv_buffer[:, index : index + PAGE]
        return self.kv_buffer[:, index // PAGE]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self._page(index).flatten() if flat else self._page(index)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * LAYERS * PAGE * HEADS * DIM, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(index)
        page.copy_(data_page.reshape(page.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if self.layout == "layer_first":
            msg = "a piece per layer: not what a storage backend should take"
            raise AssertionError(msg)
        starts = indices.tolist()[::PAGE]
        addresses = [half.data_ptr() for start in starts for half in self._page(start)]
        return addresses, [LAYERS * PAGE * HEADS * DIM * self.dtype.itemsize] * len(addresses)


class MlaPool:
    """One latent per token and layer, as in ``MLATokenToKVPoolHost`` with the layout ``page_first``."""

    def __init__(self, *, n_pages: int = 8) -> None:
        self.layout, self.dtype, self.page_size = "page_first", torch.bfloat16, PAGE
        self.layer_num, self.kv_cache_dim = LAYERS, 24
        self.kv_buffer = torch.empty(n_pages * PAGE, LAYERS, 1, 24, dtype=self.dtype)
        scramble(self.kv_buffer, seed=2)

    @property
    def memory(self) -> torch.Tensor:
        return self.kv_buffer

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[int(index) : int(index) + PAGE]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(PAGE * LAYERS * 24, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[int(index) : int(index) + PAGE] = data_page.reshape(PAGE, LAYERS, 1, 24)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses = [self.kv_buffer[start].data_ptr() for start in indices.tolist()[::PAGE]]
        return addresses, [PAGE * LAYERS * 24 * self.dtype.itemsize] * len(addresses)


class StatePool:
    """A recurrent state per checkpoint in two tables of different dtype, as in ``MambaPoolHost``."""

    def __init__(self, *, n_pages: int = 8, with_addresses: bool = True) -> None:
        self.layout, self.dtype, self.page_size = "page_first", torch.bfloat16, 1
        self._with_addresses = with_addresses
        self.temporal = torch.empty(n_pages, LAYERS, 5, dtype=torch.float32)
        self.conv = torch.empty(n_pages, LAYERS, 7, dtype=torch.bfloat16)
        scramble(self.temporal, seed=3)
        scramble(self.conv, seed=4)

    @property
    def memory(self) -> torch.Tensor:
        return torch.cat([table.view(torch.uint8).reshape(len(table), -1) for table in (self.temporal, self.conv)], 1)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        del flat
        tables = (self.temporal[int(index)], self.conv[int(index)])
        return torch.cat([table.contiguous().view(torch.uint8).reshape(-1) for table in tables])

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(LAYERS * (5 * 4 + 7 * 2), dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        cut = LAYERS * 5 * 4
        self.temporal[int(index)] = data_page[:cut].view(torch.float32).reshape(LAYERS, 5)
        self.conv[int(index)] = data_page[cut:].view(torch.bfloat16).reshape(LAYERS, 7)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if not self._with_addresses:
            msg = "side tables"
            raise NotImplementedError(msg)
        pairs = [table[i] for i in indices.tolist() for table in (self.temporal, self.conv)]
        return [part.data_ptr() for part in pairs], [part.nbytes for part in pairs]


class LopsidedPool:
    """K and V of different width, which have no flat page, as in ``AsymmetricMHATokenToKVPoolHost``."""

    def __init__(self, *, n_pages: int = 8) -> None:
        self.layout, self.dtype, self.page_size = "page_first", torch.bfloat16, PAGE
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = LAYERS, HEADS, DIM, DIM // 2
        self.k_buffer = torch.empty(n_pages * PAGE, LAYERS, HEADS, DIM, dtype=self.dtype)
        self.v_buffer = torch.empty(n_pages * PAGE, LAYERS, HEADS, DIM // 2, dtype=self.dtype)
        scramble(self.k_buffer, seed=5)
        scramble(self.v_buffer, seed=6)

    @property
    def memory(self) -> torch.Tensor:
        return torch.cat([self.k_buffer, self.v_buffer], -1)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        msg = "no flat pages"
        raise NotImplementedError(msg)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        msg = "no flat pages"
        raise NotImplementedError(msg)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        parts = [b[start : start + PAGE] for start in indices.tolist()[::PAGE] for b in (self.k_buffer, self.v_buffer)]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


class LogicalPool:
    """Hands out page numbers and has no bytes, as ``LogicalHostPool``."""

    layout, dtype, page_size, kv_buffer = "layer_first", torch.uint8, PAGE, None

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


def scramble(tensor: torch.Tensor, seed: int) -> None:
    """Fill memory with random bytes: NaN and infinities among them."""
    raw = tensor.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def bytes_of(pool: Any) -> bytes:
    return bytes(pool.memory.contiguous().view(torch.uint8).numpy().tobytes())


def wipe(pool: Any) -> None:
    for name in ("kv_buffer", "temporal", "conv", "k_buffer", "v_buffer"):
        buffer = getattr(pool, name, None)
        if buffer is not None:
            buffer.zero_()


def pages(*numbers: int, each: int = PAGE) -> torch.Tensor:
    """Host indices of whole pages."""
    return torch.tensor([number * each + i for number in numbers for i in range(each)], dtype=torch.int64)


def hashes(n: int, first: int = 0) -> list[str]:
    return [f"{first + i:064x}" for i in range(n)]
