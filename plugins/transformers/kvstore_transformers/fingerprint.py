"""Which model is this?  A cheap, sound answer that goes into the namespace."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvstore.fingerprint import fingerprint_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Per tensor 64 windows of 32 elements, evenly spaced, first and last element included.  Training,
# fine-tuning, merging an adapter or another quantization changes nearly every element of a tensor;
# a change that misses all 2,048 samples of every tensor (one edited number) is not seen.
_WINDOWS: Final = 64
_WINDOW_ELEMENTS: Final = 32


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What makes two models compute the same K/V, as far as a sample can tell.

    Attributes:
        weights: SHA-256 (hex) over names, shapes, dtypes and sampled bytes of every weight.
        text_config: SHA-256 (hex) over the config fields that may change K/V, such as RoPE.
        sampled_bytes: Bytes of weights that were read.
        seconds: Time it took.
    """

    weights: str
    text_config: str
    sampled_bytes: int
    seconds: float


def fingerprint_model(model: PreTrainedModel) -> ModelFingerprint:
    """Fingerprint a loaded model from samples of its weights and from its config.

    Equal in every process and on every device for equal weights.  Costs a few milliseconds per
    hundred tensors and never reads all weights.  Taken once: after changing weights in place, take
    it again.

    Raises:
        ValueError: A weight has no data (meta device), for instance because it was offloaded.
    """
    start_s = time.perf_counter()
    h = hashlib.sha256(b"kvstore-transformers-weights-v1")
    sampled_bytes = 0
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            _feed(h, name, repr(tensor).encode())
            continue
        if tensor.is_meta:
            msg = f"weight {name!r} has no data (meta device); load {type(model).__name__} without offloading"
            raise ValueError(msg)
        sample = _sample(tensor.detach())
        sampled_bytes += len(sample)
        _feed(h, name, f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        _feed(h, name, sample)
    return ModelFingerprint(
        weights=h.hexdigest(),
        text_config=fingerprint_config(model.config.get_text_config(decoder=True).to_dict()),
        sampled_bytes=sampled_bytes,
        seconds=time.perf_counter() - start_s,
    )


def _sample(tensor: torch.Tensor) -> bytes:
    """Bytes of evenly spaced windows, in the order of the elements whatever the strides are."""
    n_elements = tensor.numel()
    if n_elements > _WINDOWS * _WINDOW_ELEMENTS:
        starts = torch.arange(_WINDOWS) * (n_elements - _WINDOW_ELEMENTS) // (_WINDOWS - 1)
        flat = (starts[:, None] + torch.arange(_WINDOW_ELEMENTS)).reshape(-1).to(tensor.device)
        tensor = tensor[torch.unravel_index(flat, tensor.shape)]
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _feed(h: hashlib._Hash, name: str, data: bytes) -> None:
    for part in (name.encode(), data):
        h.update(len(part).to_bytes(8, "little") + part)
