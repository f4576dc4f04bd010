from __future__ import annotations

import pytest

from kvstore.cli.demo.prompts import QUESTIONS, document_text, fit_document, user_message


def words(text: str) -> int:
    return len(text.split())


def test_prompts_about_one_document_share_everything_before_the_question() -> None:
    first, second = (user_message(document_text(), question) for question in QUESTIONS)

    assert first.removesuffix(QUESTIONS[0]) == second.removesuffix(QUESTIONS[1])


@pytest.mark.parametrize("n_words", [60, 200, 900])
def test_shortened_document_ends_with_a_sentence_and_fits(n_words: int) -> None:
    text = fit_document(document_text(), n_words, words)

    assert n_words - 60 < words(text) <= n_words
    assert document_text().startswith(text)
    assert text.endswith(".")


def test_longer_prompt_repeats_the_document() -> None:
    whole = words(document_text())

    text = fit_document(document_text(), 2 * whole + 100, words)

    assert text.count(document_text()) == 2
    assert 2 * whole < words(text) <= 2 * whole + 100


def test_facts_that_are_asked_for_are_in_the_shortest_document() -> None:
    text = fit_document(document_text(), 120, words)

    assert "Marta Lindqvist" in text
    assert "Biscuit" in text
