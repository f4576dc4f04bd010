"""The document, the questions, and how they become a prompt."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Final

QUESTIONS: Final = (
    "Who is the chief of the weather station?",
    "What is the name of the supply boat?",
)

_INSTRUCTION: Final = "Read this handbook, then answer one question about it in one short sentence.\n\n"
_QUESTION: Final = "\n\nQuestion: "


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
    once = _sentences(text)
    whole = prompt_tokens(text)
    sentences = once * (1 + max(0, n_tokens) // whole)
    low, high = 1, len(sentences)
    while low < high:  # the longest run of leading sentences that fits
        middle = (low + high + 1) // 2
        if prompt_tokens("".join(sentences[:middle])) <= n_tokens:
            low = middle
        else:
            high = middle - 1
    return "".join(sentences[:low]).strip()


def _sentences(text: str) -> list[str]:
    """Sentences with the space behind them; a repeated document starts on a new paragraph."""
    paragraphs = [paragraph.replace(". ", ". \0").split("\0") for paragraph in text.split("\n\n")]
    return [sentence for paragraph in paragraphs for sentence in [*paragraph[:-1], paragraph[-1] + "\n\n"]]
