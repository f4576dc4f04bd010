"""The shape of one KV block, and how its bytes are laid out."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

# name -> (id stored in records, bytes per element); ids are for life, never renumber
DTYPES: Final[dict[str, tuple[int, int]]] = {
    "opaque": (0, 1),
    "float32": (1, 4),
    "float16": (2, 2),
    "bfloat16": (3, 2),
    "float8_e4m3fn": (4, 1),
    "float8_e5m2": (5, 1),
    "int8": (6, 1),
    "uint8": (7, 1),
}

# Stored layout ids, for life. 0 is opaque; 255 means "see the spec fingerprint".
LAYOUTS: Final[dict[str, int]] = {
    "opaque": 0,
    "LCND": 1,
    "NCLD": 2,
    "LCHND": 3,
    "LNCD": 4,
    "CLND": 5,
    "NLCD": 6,
    "CNLD": 7,
}
OTHER_LAYOUT_ID: Final = 255

_MAX_BLOCK_BYTES: Final = 1 << 32  # segment lengths are u32; a block above 4 GiB is a mistake
_MAX_DIM: Final = 1 << 31


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return the canonical dtype name, accepting ``"bfloat16"`` or ``torch.bfloat16``.

    Raises:
        ValueError: The dtype cannot be stored.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES or name == "opaque":
        known = ", ".join(sorted(n for n in DTYPES if n != "opaque"))
        msg = f"dtype {name!r} cannot be stored; use one of {known}"
        raise ValueError(msg)
    return name


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Shape, dtype and layout of one block; immutable, hashable, free of torch.

    Args:
        layers: Transformer layers in the block, at least 1.
        kv_heads: KV heads per layer held by the block, at least 1.
        head_dim: Elements per head, at least 1.
        block_tokens: Tokens per block, at least 1.
        dtype: ``"bfloat16"`` (or ``torch.bfloat16``), ``float32``, ``float16``,
            ``float8_e4m3fn``, ``float8_e5m2``, ``int8``, ``uint8``.
        layout: Order of the axes, outermost first: L layers, C key/value, N tokens, H heads,
            D head elements (always last; H stands right before D when it is not named).
            ``LCND`` is ``[layers, kv, tokens, kv_heads, head_dim]``.
        kv: 2 for separate keys and values, 1 for MLA latents.

    Raises:
        ValueError: A value is out of range or the layout is not a permutation of the axes.

    Example:
        >>> spec = BlockSpec(layers=2, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16")
        >>> spec.shape, spec.nbytes
        ((2, 2, 16, 4, 64), 32768)
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    layout: str = "LCND"
    kv: int = 2
    opaque_tag: str = ""

    def __post_init__(self) -> None:
        if self.layout == "opaque":
            _check_opaque(self)
            return
        if self.opaque_tag:
            msg = f"BlockSpec.opaque_tag is {self.opaque_tag!r}; only opaque specs have one: use BlockSpec.opaque(...)"
            raise ValueError(msg)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "kv"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MAX_DIM:
                msg = f"BlockSpec.{name} is {value!r}; expected an integer of at least 1"
                raise ValueError(msg)
        if self.kv not in (1, 2):
            msg = f"BlockSpec.kv is {self.kv}; expected 2 (keys and values) or 1 (MLA latents)"
            raise ValueError(msg)
        _axes(self.layout)
        if self.nbytes >= _MAX_BLOCK_BYTES:
            msg = f"one block takes {self.nbytes} bytes; expected less than {_MAX_BLOCK_BYTES}: use fewer block_tokens"
            raise ValueError(msg)

    @classmethod
    def opaque(cls, nbytes: int, *, block_tokens: int, tag: str) -> BlockSpec:
        """Describe blocks whose bytes only the engine understands.

        Args:
            nbytes: Size of a block in bytes, at least 1.
            block_tokens: Tokens that a block stands for.
            tag: Names the engine's layout; part of the identity, so that other bytes of the same
                size never match.
        """
        return cls(
            layers=1,
            kv_heads=1,
            head_dim=nbytes,
            block_tokens=block_tokens,
            dtype="opaque",
            layout="opaque",
            kv=1,
            opaque_tag=tag,
        )

    @property
    def is_opaque(self) -> bool:
        """Whether the block is just bytes."""
        return self.layout == "opaque"

    @property
    def axes(self) -> str:
        """The axes outermost first with H spelled out, such as ``"LCNHD"``; ``"D"`` when opaque."""
        return "D" if self.is_opaque else _axes(self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one block as a tensor, outermost axis first."""
        if self.is_opaque:
            return (self.head_dim,)
        sizes = {"L": self.layers, "C": self.kv, "N": self.block_tokens, "H": self.kv_heads, "D": self.head_dim}
        return tuple(sizes[axis] for axis in self.axes)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * self.itemsize

    @property
    def dtype_id(self) -> int:
        """The dtype's number in stored records."""
        return DTYPES[self.dtype][0]

    @property
    def layout_id(self) -> int:
        """The layout's number in stored records."""
        return LAYOUTS.get(self.layout, OTHER_LAYOUT_ID)

    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of a block; imports torch."""
        import torch

        dtype: torch.dtype = torch.uint8 if self.is_opaque else getattr(torch, self.dtype)
        return dtype

    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever the bytes of a block would mean something else."""
        fields: tuple[Any, ...] = (
            self.dtype,
            self.axes,
            self.kv,
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.block_tokens,
            self.opaque_tag,
        )
        h = hashlib.sha256(b"kvstore-block-spec-v1")
        for value in fields:
            text = str(value).encode(errors="surrogatepass")
            h.update(len(text).to_bytes(4, "little") + text)
        return h.digest()[:16]


def _axes(layout: str) -> str:
    axes = layout if "H" in layout else layout.replace("D", "HD")
    if sorted(axes) != sorted("LCNHD") or not axes.endswith("D"):
        msg = (
            f"layout {layout!r} is not valid; expected an order of L, C, N and D (or L, C, N, H and D) "
            "that ends in D, such as 'LCND'"
        )
        raise ValueError(msg)
    return axes


def _check_opaque(spec: BlockSpec) -> None:
    plain = spec.dtype == "opaque" and (spec.layers, spec.kv_heads, spec.kv) == (1, 1, 1)
    if not plain or not spec.opaque_tag:
        msg = (
            "an opaque spec needs a tag that names the engine's layout; "
            "use BlockSpec.opaque(nbytes, block_tokens=..., tag=...)"
        )
        raise ValueError(msg)
    for name, field in (("nbytes", "head_dim"), ("block_tokens", "block_tokens")):
        value = getattr(spec, field)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MAX_DIM:
            msg = f"BlockSpec.opaque {name} is {value!r}; expected an integer from 1 to {_MAX_DIM - 1}"
            raise ValueError(msg)
