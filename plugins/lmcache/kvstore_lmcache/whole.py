"""What LMCache allocates for a chunk, whole or shorter."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch
from lmcache.v1.memory_management import MemoryFormat

from kvstore_lmcache.layout import ChunkLayout, dtype_of

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

_POLL_S: Final = 0.005  # LMCache does not say when its memory pool has room again


class WholeChunk:
    """Layout of a whole chunk, as LMCache describes it for this engine.

    Args:
        connector: Has LMCache's shapes, dtypes and format of a chunk of all layers.
        config: LMCache's configuration.
        metadata: LMCache's description of the engine.
    """

    def __init__(self, connector: RemoteConnector, config: Any, metadata: Any) -> None:
        self._shapes: list[torch.Size] = connector.meta_shapes
        self._dtypes: list[torch.dtype] = connector.meta_dtypes
        self._fmt = connector.meta_fmt
        if config.use_layerwise:
            tokens, hidden = metadata.chunk_size, self._shapes[0][-1]
            self._dtypes = self._dtypes[:1]
            if metadata.use_mla:
                self._shapes = [torch.Size([tokens, hidden])]
            elif config.enable_blending:
                self._shapes, self._fmt = [torch.Size([2, tokens, hidden])], MemoryFormat.KV_2TD
            else:
                self._shapes, self._fmt = [torch.Size([tokens, 2, hidden])], MemoryFormat.KV_T2D
        self.layout: Final = ChunkLayout.of(self._shapes, self._dtypes, self._fmt.name)

    def allocate(self, backend: Any, layout: ChunkLayout, until: float) -> MemoryObj | None:
        """Memory of LMCache's, waited for until a time; never in LMCache's own endless loop."""
        if layout == self.layout:
            shapes, dtypes, fmt = self._shapes, self._dtypes, self._fmt
        else:
            shapes = [torch.Size(shape) for _, shape in layout.parts]
            dtypes = [dtype_of(name) for name, _ in layout.parts]
            fmt = MemoryFormat[layout.fmt]
        while True:
            memory = backend.allocate(shapes, dtypes, fmt, busy_loop=False)
            if memory is not None or time.monotonic() >= until:
                return memory
            time.sleep(_POLL_S)
