"""The digest by which the demo compares K/V of different processes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of a contiguous host tensor's bytes."""
    import torch

    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
