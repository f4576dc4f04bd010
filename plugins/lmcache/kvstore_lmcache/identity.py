"""Whose KV the chunks are: the namespace for a model's name."""

from __future__ import annotations

from kvstore import Namespace
from kvstore.engines.model_files import find_model
from kvstore.fingerprint import fingerprint_config
from kvstore_lmcache.options import Options


def namespace_of(model: str, options: Options, layout: str, version: str | None = None) -> Namespace:
    """Name a model's chunks.

    A folder's weights are fingerprinted, so that other weights in the same folder are another model; a
    Hugging Face download is known by its commit.  What LMCache's keys hold (ranks, dtype, layer) is in the keys.

    Args:
        model: Name as LMCache has it.
        options: What the user says about it.
        layout: What the spec does not say: the chunks' memory format and shapes, and how they are hashed.
        version: LMCache's version; descriptive.
    """
    files = find_model(model)
    config = None if files.fields is None else fingerprint_config(files.fields)
    return Namespace(
        model=files.name,
        revision=options.revision or files.revision,
        text_config=options.text_config or config,
        kv_scales=options.kv_scales,
        engine_layout=layout,
        engine="lmcache",
        engine_version=version,
    )
