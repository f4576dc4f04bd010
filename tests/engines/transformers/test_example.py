"""The example runs as it stands, on a model and a tokenizer made here."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformers_generate.py"


def save_tokenizer(folder: Path, text: str) -> int:
    """A tokenizer of whole words; returns the size of its vocabulary."""
    vocabulary = {word: i for i, word in enumerate(["?", *sorted(set(text.split()))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106 - a token of text
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = transformers.PreTrainedTokenizerFast
    tokenizer(tokenizer_object=inner, unk_token="?").save_pretrained(folder)  # noqa: S106
    return len(vocabulary)


def test_second_question_and_second_run_are_restored(
    tmp_path: Path, build_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    n_words = save_tokenizer(tmp_path / "model", EXAMPLE.read_text(encoding="utf-8"))
    build_model(vocab_size=n_words).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path / "model"), str(tmp_path / "store")])

    for _ in range(2):
        runpy.run_path(str(EXAMPLE), run_name="__main__")

    restored = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines() if "tokens restored" in line]
    assert restored[0] == 0
    assert restored[1] >= 112
    assert restored[2] >= restored[1]
    assert len(restored) == 4
