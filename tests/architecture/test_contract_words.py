"""Every word of the contract is called by the core, or says that it is provisional."""

from __future__ import annotations

import pytest

from tests.architecture import contract_words
from tests.architecture.contract_words import PROVISIONAL, Word


def test_every_word_of_the_contract_is_called() -> None:
    assert contract_words.never_called() == []


def test_the_search_covers_every_kind_of_contract_word() -> None:
    found = {str(word) for word in contract_words.words()}
    some = {"role", "launcher", "Draws.step", "Sleeps.wake", "Window.rollout", "Header.cost"}
    assert some <= found
    assert len(found) > 300


@pytest.mark.parametrize("word", [Word("Window", "backlogged", "placement"), Word("", "cook", "")])
def test_a_word_that_nothing_calls_is_found(word: Word, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract_words, "words", lambda: [word])
    assert contract_words.never_called() == [str(word)]


def test_a_name_of_the_contract_that_no_code_uses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = contract_words.top_words()
    assert {"Generator", "WeightPlan", "gcore_check", "HEADER_LIMIT_BYTES"} <= found
    monkeypatch.setattr(contract_words, "top_words", lambda: {*found, "UNHEARD_OF"})
    assert contract_words.never_called() == ["UNHEARD_OF"]


def test_words_without_a_caller_are_documented_as_provisional() -> None:
    docs = {str(word): word.doc for word in contract_words.words()}
    for name in PROVISIONAL:
        assert "provisional" in docs[name].lower(), f"{name} does not say that it is provisional"
