"""kvstore connector for Hugging Face transformers: ``generate`` skips the prefill of known prompts.

::

    with kvstore_transformers.open_cache(model, "kvstore.toml") as cached:
        output = cached.generate(input_ids, max_new_tokens=64)
"""

from __future__ import annotations

from kvstore_transformers.cached_model import CachedModel, open_cache
from kvstore_transformers.fingerprint import ModelFingerprint, fingerprint_model
from kvstore_transformers.identity import ModelIdentity, identify_model
from kvstore_transformers.results import PrefillResult, PrefillTimings

__all__ = [
    "CachedModel",
    "ModelFingerprint",
    "ModelIdentity",
    "PrefillResult",
    "PrefillTimings",
    "fingerprint_model",
    "identify_model",
    "open_cache",
]
