"""The document, the questions, and how they become a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from typing import Final

QUESTIONS: Final = (
    "Who is the chief of the weather station?",
    "What is the name of the station dog?",
)

_INSTRUCTION: Final = "Read this handbook, then answer one question about it in one short sentence.\n\n"
_QUESTION: Final = "\n\nQuestion: "
_SENTENCE_END: Final = re.compile(r"(?<=[a-z]\.)(?=\s)")  # not behind a section's number


def document_text() -> str:
    """The document that ships with the demo."""
    return files("kvstore.cli.demo").joinpath("document.txt").read_text(encoding="utf-8").strip()


def user_message(document: str, question: str) -> str:
    """Document first, so that prompts about one document share a prefix."""
    return f"{_INSTRUCTION}{document}{_QUESTION}{question}"


def fit_document(text: str, n_tokens: int, prompt_tokens: Callable[[str], int]) -> str:
    """Cut or repeat the document at sentence ends so that the prompt has about ``n_tokens``.

    Args:
        text: The whole document.
        n_tokens: Upper bound of the prompt's length.
        prompt_tokens: Length in tokens of the whole prompt for a document.
    """
    once = _SENTENCE_END.split(text)
    whole = prompt_tokens(text)
    sentences = once + ["\n\n" + once[0], *once[1:]] * (n_tokens // whole)
    low, high = 1, len(sentences)
    while low < high:  # the longest run of leading sentences that fits
        middle = (low + high + 1) // 2
        if prompt_tokens("".join(sentences[:middle])) <= n_tokens:
            low = middle
        else:
            high = middle - 1
    return "".join(sentences[:low]).strip()
