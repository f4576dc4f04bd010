"""Which weights and which config is this?  Cheap answers that go into a namespace, without loading a model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

WEIGHT_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth")

# Per file: its first MiB (a safetensors header names every tensor, shape and offset), then 64 windows of
# 4 KiB, evenly spaced, the last bytes included.  Fine-tuning, merging an adapter or another quantization
# changes nearly every byte; a change that misses every window of every file (one edited number) is not seen.
_HEAD_BYTES: Final = 1 << 20
_WINDOWS: Final = 64
_WINDOW_BYTES: Final = 4096

# Fields of a model config that say nothing about K/V: who saved it, and how text is made or reported.
# Whatever is not listed counts, so that an unknown field makes the cache cold and never wrong.
_IRRELEVANT_FIELDS: Final = frozenset({
    "_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward", "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id",
    "pad_token_id", "sep_token_id", "_attn_implementation", "_attn_implementation_internal",
})  # fmt: skip


def fingerprint_weights(folder: str | os.PathLike[str]) -> str:
    """Fingerprint a folder of weight files, or a single one, from names, sizes and sampled bytes.

    Equal on every host for equal files, whatever their times and wherever the folder lies; a Hugging
    Face snapshot folder of links is the same as a copy of it.  Reads at most 1.3 MiB a file, so a model
    of hundreds of gigabytes costs milliseconds per file.

    Args:
        folder: Folder with ``.safetensors``, ``.gguf``, ``.bin``, ``.pt`` or ``.pth`` files (those of one kind
            count: the first of these kinds that is there, since folders often hold the same weights twice);
            or one such file, whose own name does not count.

    Returns:
        SHA-256 in hex.

    Raises:
        ValueError: The folder does not exist or holds no weight file.
        OSError: A file cannot be read.
    """
    path = Path(folder)
    files = _weight_files(path)
    if not files:
        raise ValueError(
            f"{os.fspath(folder)!r} holds no weights ({', '.join(WEIGHT_SUFFIXES)}); "
            "expected the folder of a downloaded model, or say the revision yourself"
        )
    h = hashlib.sha256(b"kvstore-weight-files-v1")
    for file in files:
        _feed(h, file.relative_to(path).as_posix().encode())
        for part in _samples(file):
            _feed(h, part)
    return h.hexdigest()


def fingerprint_config(fields: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a model config's fields (``config.json``), without those that cannot change K/V."""
    relevant = {name: value for name, value in fields.items() if name not in _IRRELEVANT_FIELDS}
    text = json.dumps(relevant, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(b"kvstore-transformers-config-v1" + text.encode()).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    for suffix in WEIGHT_SUFFIXES:
        files = sorted(file for file in folder.rglob(f"*{suffix}") if file.is_file())
        if files:
            return files
    return []


def _samples(file: Path) -> Iterator[bytes]:
    with file.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        yield size.to_bytes(8, "little")
        yield f.read(_HEAD_BYTES)
        for number in range(_WINDOWS if size > _HEAD_BYTES else 0):
            rest = size - _HEAD_BYTES - _WINDOW_BYTES
            f.seek(_HEAD_BYTES + max(0, rest) * number // (_WINDOWS - 1))
            yield f.read(_WINDOW_BYTES)


def _feed(h: hashlib._Hash, data: bytes) -> None:
    h.update(len(data).to_bytes(8, "little") + data)
