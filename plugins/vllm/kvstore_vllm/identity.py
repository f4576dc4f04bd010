"""Whose KV vLLM computes: from its configuration to a namespace, by what the bytes hold.

vLLM's block hashes say nothing about the model, and its own offloading folders name it by the path
that was given on the command line.  Here weights, configuration, dtype and layout decide.  vLLM is
not imported: its configuration objects are read by attribute, and what a version lacks is not said.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.engines.model_files import find_model
from kvstore.errors import ConfigError
from kvstore.fingerprint import fingerprint_config
from kvstore.namespace import Namespace
from kvstore_vllm.options import EngineOptions

ENGINE: Final = "vllm"

# Cache dtypes of 8 bits and fewer that keep their scales inside the block's own bytes.
_INLINE_SCALES: Final = ("_per_token_head", "_ds_mla")
_UNSCALED_DTYPES: Final = ("auto", "float32", "float16", "bfloat16", "half", "bfloat", "float")

# RoPE variants whose K does not depend on the longest context the engine was started for; for every
# other one (longrope picks its factors by max_model_len, dynamic NTK by the length) it is part of
# the identity.
_LENGTH_FREE_ROPE: Final = ("default", "linear", "llama3", "yarn", "mrope", "proportional")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What decides K and V, besides tokens and layout.

    Attributes:
        model: Name of the weights.
        revision: Which weights exactly; None when it could not be found out.
        text_config: Fingerprint of the configuration.
        kv_scales: What scales 8-bit KV has; None when it has none of its own.
        kv_dtype: Dtype of the stored elements, such as ``"bfloat16"`` or ``"fp8_e4m3"``.
        cautions: Sentences to log once.
    """

    model: str
    revision: str | None
    text_config: str
    kv_scales: str | None
    kv_dtype: str
    cautions: tuple[str, ...] = ()


def identify_model(vllm_config: Any, options: EngineOptions) -> ModelIdentity:
    """Find out whose KV a vLLM engine computes.

    Reads at most a megabyte or so per weight file, and only for local folders.

    Args:
        vllm_config: vLLM's ``VllmConfig``, or anything with the same attributes.
        options: What the user says instead.

    Raises:
        ConfigError: 8-bit KV whose scales are not identified: they would be applied to other bytes.
    """
    model_config = vllm_config.model_config
    source = str(getattr(model_config, "model_weights", "") or model_config.model)
    model, revision = _weights(source, model_config)
    cautions: tuple[str, ...] = ()
    revision = options.revision or revision
    if options.weights_version is not None:
        revision = f"{revision}+{options.weights_version}" if revision else f"weights {options.weights_version}"
    if revision is None:
        cautions = (
            f"the weights of {model!r} are not identified: other weights under that name would share; set 'revision'",
        )
    cache_config = vllm_config.cache_config
    kv_dtype = _dtype(getattr(cache_config, "cache_dtype", "auto"))
    compute_dtype = _dtype(getattr(model_config, "dtype", "auto"))
    return ModelIdentity(
        model=options.model or model,
        revision=revision,
        text_config=options.text_config or _text_config(model_config, compute_dtype),
        kv_scales=_kv_scales(kv_dtype, cache_config, revision, options),
        kv_dtype=compute_dtype if kv_dtype == "auto" else kv_dtype,
        cautions=cautions,
    )


def namespace_of(identity: ModelIdentity, *, engine_layout: str | None, vllm_config: Any) -> Namespace:
    """Make the namespace of an engine's blocks.

    Who wrote them (rank, world size, version) only describes: engines whose blocks have equal bytes
    share them, and ``engine_layout`` separates all others.

    Args:
        identity: From :func:`identify_model`.
        engine_layout: Names what the block spec cannot say about the bytes.
        vllm_config: vLLM's ``VllmConfig``.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    return Namespace(
        model=identity.model,
        revision=identity.revision,
        text_config=identity.text_config,
        kv_scales=identity.kv_scales,
        engine_layout=engine_layout,
        engine=ENGINE,
        engine_version=engine_version(),
        rank=getattr(parallel, "rank", None),
        world_size=getattr(parallel, "world_size", None),
        host=os.uname().nodename or None,
    )


@functools.cache
def engine_version() -> str | None:
    """Version of the vLLM that runs in this process; None when there is none."""
    version = getattr(sys.modules.get(ENGINE), "__version__", None)
    return str(version) if version else None


def check_hash_algorithm(vllm_config: Any, options: EngineOptions) -> None:
    """Refuse block hashes that do not identify a prompt.

    Raises:
        ConfigError: A non-cryptographic algorithm, unless ``allow_weak_hashes`` is set.
    """
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256") or "sha256")
    if algorithm.startswith("sha256") or options.allow_weak_hashes:
        return
    raise ConfigError(
        f"prefix_caching_hash_algo = {algorithm!r}: its 16-byte hashes are not collision-resistant, so that one "
        "prompt could be answered with the KV of another, and vLLM seeds them at random in every process, so that "
        "nothing would be found after a restart; start vLLM with --prefix-caching-hash-algo sha256 or sha256_cbor, "
        "or set 'allow_weak_hashes' to true and PYTHONHASHSEED to the same value in all processes"
    )


def hash_caution(vllm_config: Any) -> str | None:
    """Say what a permitted weak algorithm costs; None for the others."""
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256") or "sha256")
    if algorithm.startswith("sha256"):
        return None
    if os.environ.get("PYTHONHASHSEED"):
        return f"prefix_caching_hash_algo = {algorithm!r}: its hashes are not collision-resistant"
    return (
        f"prefix_caching_hash_algo = {algorithm!r} without PYTHONHASHSEED: vLLM seeds the hashes at random in every "
        "process, so NOTHING that is stored now will be found after a restart or by another process"
    )


def _weights(source: str, model_config: Any) -> tuple[str, str | None]:
    """Name and revision of the weights at ``source``: as asked for, as loaded, or as the files say."""
    files = find_model(source, getattr(model_config, "revision", None))
    if files.is_local:
        return _local_name(model_config), files.revision
    loaded = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    return files.name, str(loaded) if loaded else files.revision


def _local_name(model_config: Any) -> str:
    """A name that does not depend on where a folder lies; the revision tells the weights apart."""
    architectures = getattr(getattr(model_config, "hf_config", None), "architectures", None) or ()
    return str(architectures[0]) if architectures else "local"


def _text_config(model_config: Any, compute_dtype: str) -> str:
    hf_text_config = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    values = hf_text_config if isinstance(hf_text_config, Mapping) else hf_text_config.to_dict()
    fields: dict[str, Any] = {name: value for name, value in values.items() if not name.startswith("_")}
    fields["vllm.dtype"] = compute_dtype
    quantization = getattr(model_config, "quantization", None)
    if quantization is not None:
        fields["vllm.quantization"] = str(quantization)
    if not _rope_types(fields) <= set(_LENGTH_FREE_ROPE):
        fields["vllm.max_model_len"] = getattr(model_config, "max_model_len", None)
    return fingerprint_config(fields)


def _rope_types(fields: Mapping[str, Any]) -> set[str]:
    """RoPE types in a config, also where every kind of layer has its own parameters."""
    found: set[str] = set()
    for name in ("rope_parameters", "rope_scaling"):
        parameters = fields.get(name)
        if not isinstance(parameters, Mapping):
            continue
        nested = [value for value in parameters.values() if isinstance(value, Mapping)]
        for one in nested or [parameters]:
            found.add(str(one.get("rope_type") or one.get("type") or "default"))
    return found


def _dtype(value: object) -> str:
    return str(value).removeprefix("torch.")


def _kv_scales(kv_dtype: str, cache_config: Any, revision: str | None, options: EngineOptions) -> str | None:
    """Which scales the KV was quantized with; refused when that is not known."""
    if options.kv_scales is not None:
        return options.kv_scales
    if kv_dtype in _UNSCALED_DTYPES or kv_dtype.endswith(_INLINE_SCALES):
        return None
    if getattr(cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            f"cache_dtype = {kv_dtype!r} with calculate_kv_scales: every start computes other scales, and KV that is "
            "read with other scales than it was written with is garbage; use scales from the checkpoint, or set "
            "'kv_scales' to a digest of the scales"
        )
    if revision is None:
        raise ConfigError(
            f"cache_dtype = {kv_dtype!r}: the scales come with the weights, and the weights are not identified; "
            "set 'revision' (the repository's commit), or 'kv_scales' to a digest of the scales"
        )
    return "checkpoint"  # part of the weights, which the revision identifies
