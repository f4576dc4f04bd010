"""What a chunk's bytes are: shapes, dtypes and format, as a tag and as a header in front of odd chunks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from kvstore import BlockSpec

HEADER_BYTES: Final = 4096
"""Room for the header of a self-described chunk: one page, so that what follows stays aligned."""


# LMCache's memory formats as axes, by number of dimensions: L layers, C key and value, N tokens, D elements of all
# heads.  The format of an object in its server is not told; there it is that of four dimensions.
_AXES: Final = {
    ("KV_2LTD", 4): "CLND",
    ("KV_MLA_FMT", 4): "CLND",
    ("", 4): "CLND",
    ("KV_T2D", 3): "NCD",
    ("KV_2TD", 3): "CND",
    ("KV_MLA_FMT", 2): "ND",
}


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """How chunks are stored.

    Attributes:
        spec: Their block spec.
        tag: What the spec does not say: equal exactly for chunks of equal layout.
    """

    spec: BlockSpec
    tag: str


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Shapes, dtypes and memory format of a chunk.

    Attributes:
        parts: Dtype name (such as ``"bfloat16"``) and shape of each tensor in the chunk, in order;
            models with one kind of layer have one.
        fmt: LMCache's name of the memory format; ``""`` where it is not told.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    fmt: str = ""

    @classmethod
    def of(cls, shapes: Iterable[Iterable[int]], dtypes: Iterable[torch.dtype], fmt: str = "") -> ChunkLayout:
        """Make a layout from shapes and torch dtypes, one of each per part."""
        pairs = zip(dtypes, shapes, strict=True)
        return cls(tuple((str(dtype).removeprefix("torch."), tuple(map(int, shape))) for dtype, shape in pairs), fmt)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk."""
        return sum(dtype_of(name).itemsize * math.prod(shape) for name, shape in self.parts)

    @property
    def tag(self) -> str:
        """Text that is equal exactly for equal layouts."""
        parts = " ".join(f"{name}{list(shape)}".replace(" ", "") for name, shape in self.parts)
        return f"lmcache {self.fmt} {parts}" if self.fmt else f"lmcache {parts}"

    def form(self, chunk_tokens: int) -> ChunkForm:
        """How chunks of this layout are stored.

        Where a chunk is one tensor of a known order, the spec names its axes and dtype, so that codecs know
        what they compress; otherwise it is opaque.  Both have exactly the chunk's bytes.

        Args:
            chunk_tokens: Tokens of a chunk, for a spec that cannot know better; at least 1.
        """
        return ChunkForm(
            self._typed_spec() or BlockSpec.opaque(self.nbytes, block_tokens=chunk_tokens, tag=self.tag), self.tag
        )

    def described_form(self, chunk_tokens: int) -> ChunkForm:
        """How chunks of at most this layout's size are stored behind a header."""
        tag = f"{self.tag} with header"
        return ChunkForm(BlockSpec.opaque(HEADER_BYTES + self.nbytes, block_tokens=chunk_tokens, tag=tag), tag)

    def to_header(self) -> bytes:
        """The layout as ``HEADER_BYTES`` bytes.

        Raises:
            ValueError: The layout has too many parts for a header.
        """
        text = json.dumps({"fmt": self.fmt, "parts": self.parts}, separators=(",", ":")).encode()
        if len(text) > HEADER_BYTES:
            raise ValueError(f"a chunk of {len(self.parts)} parts needs {len(text)} bytes; expected <= {HEADER_BYTES}")
        return text.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_header(cls, header: bytes) -> ChunkLayout:
        """Read what :meth:`to_header` wrote.

        Raises:
            ValueError: The bytes are no header.
        """
        try:
            fields = json.loads(header.rstrip(b"\0"))
            parts = tuple((str(name), tuple(int(n) for n in shape)) for name, shape in fields["parts"])
            layout = cls(parts, str(fields["fmt"]))
            known = layout.nbytes >= 0 and all(n >= 0 for _, shape in parts for n in shape)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
            raise ValueError(f"{header[:40]!r}... is no chunk header") from e
        if not known:
            raise ValueError(f"{header[:40]!r}... is no chunk header: negative sizes")
        return layout

    def _typed_spec(self) -> BlockSpec | None:
        if len(self.parts) != 1:
            return None
        dtype, shape = self.parts[0]
        axes = _AXES.get((self.fmt, len(shape)))
        if axes is None:
            return None
        sizes = {"L": 1, "C": 1} | dict(zip(axes, shape, strict=True))
        try:
            return BlockSpec(
                layers=sizes["L"],
                kv_heads=1,  # LMCache does not say where a head ends
                head_dim=sizes["D"],
                block_tokens=sizes["N"],
                dtype=dtype,
                layout="".join(axis for axis in "LC" if axis not in axes) + axes,
                kv=sizes["C"],
            )
        except ValueError:  # a dtype or sizes that no block can have
            return None


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")  # noqa: TRY004 - the value is wrong, not its type
    return dtype
