"""What is trained on, token by token, for texts and for chats under several templates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_algorithms.offline.remembered import RememberingTokenizer
from gcore_algorithms.offline.rows import Example
from gcore_algorithms.offline.tokens import encode_answers, encode_texts
from gcore_language.chats import Unreadable
from gcore_language.prompts import added_tokens
from gcore_language.tiny import save_tokenizer
from tokenizers.processors import TemplateProcessing

from gcore_core.contract.errors import DataError

_TURN = "{% for m in messages %}{{ 'y' if m.role == 'assistant' else 'n' }}="
#: Each turn is written as y (the assistant) or n, "=", its content, and the end token.
PLAIN = _TURN + "{{ m.content }}<eos>+{% endfor %}{% if add_generation_prompt %}y={% endif %}"
MARKED = (
    _TURN + "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}<eos>"
    "{% endif %}+{% endfor %}{% if add_generation_prompt %}y={% endif %}"
)
#: Like PLAIN, but of all answers only the last is written whole.
FORGETS = (
    _TURN + "{% if m.role == 'assistant' and not loop.last %}"
    "0{% else %}{{ m.content }}{% endif %}<eos>+{% endfor %}"
    "{% if add_generation_prompt %}y={% endif %}"
)
TALK = [
    {"role": "user", "content": "12"},
    {"role": "assistant", "content": "345"},
    {"role": "user", "content": "6"},
    {"role": "assistant", "content": "78"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def shown(tokenizer: Any, encoded: Any) -> tuple[str, str, str]:
    """The prompt, the actions, and the actions with what is not trained on as dots."""
    words = tokenizer.convert_ids_to_tokens(encoded.actions)
    words = ["$" if word == "<eos>" else word for word in words]
    kept = [word if on else "." for word, on in zip(words, encoded.mask, strict=True)]
    before = tokenizer.convert_ids_to_tokens(encoded.prompt)
    return "".join("$" if w == "<eos>" else w for w in before), "".join(words), "".join(kept)


def answers(tokenizer: Any, example: Example, **settings: Any) -> list[tuple[str, str, str]]:
    settings = {"last_turn": False, "add_end": True, "where": "row 5", **settings}
    remembering = RememberingTokenizer(tokenizer, added_tokens(tokenizer))
    return [shown(tokenizer, one) for one in encode_answers(remembering, example, **settings)]


def test_an_answer_is_encoded_by_itself_and_ends(tokenizer: Any) -> None:
    assert answers(tokenizer, Example("1+2=", ["3"])) == [("<bos>1+2=", "3$", "3$")]
    assert answers(tokenizer, Example("1+2=", ["3"]), add_end=False) == [("<bos>1+2=", "3", "3")]


def test_of_a_text_without_prompt_all_but_the_first_token_is_trained_on(tokenizer: Any) -> None:
    assert answers(tokenizer, Example("", ["12"])) == [("<bos>", "12$", "12$")]


def test_answers_of_a_pair_have_one_prompt(tokenizer: Any) -> None:
    pair = answers(tokenizer, Example("1+2=", ["3", "34"]))
    assert pair == [("<bos>1+2=", "3$", "3$"), ("<bos>1+2=", "34$", "34$")]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefix", "mask"])
def test_all_turns_of_the_assistant_are_trained_on_and_nothing_else(
    tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    whole = "n=12$+y=345$+n=6$+y=78$"
    begins = whole.index("345")
    (turns,) = answers(tokenizer, Example([], [TALK]))
    assert turns == (whole[:begins], whole[begins:], "345$........78$")
    (last,) = answers(tokenizer, Example([], [TALK]), last_turn=True)
    assert last == ("n=12$+y=345$+n=6$+y=", "78$", "78$")
    (given,) = answers(tokenizer, Example(TALK[:3], [TALK[3:]]))
    assert given == last, "turns of the prompt are not trained on"


def test_what_a_template_writes_after_the_end_is_not_trained_on(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    ((_, actions, _),) = answers(tokenizer, Example(TALK[:1], [TALK[1:2]]))
    assert actions == "345$", "the template's '+' follows the end token"


def test_an_answer_without_an_end_gets_one(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN.replace("<eos>", "-")
    ((_, actions, kept),) = answers(tokenizer, Example(TALK[:1], [TALK[1:2]]))
    assert actions == kept == "345-+$"


def test_a_template_that_rewrites_earlier_turns_is_refused_for_all_but_the_last(
    tokenizer: Any,
) -> None:
    tokenizer.chat_template = FORGETS
    with pytest.raises(DataError, match="does not show which tokens of turn 1") as caught:
        answers(tokenizer, Example([], [TALK]))
    assert "row 5" in str(caught.value)
    (last,) = answers(tokenizer, Example([], [TALK]), last_turn=True)
    assert last == ("n=12$+y=0$+n=6$+y=", "78$", "78$")


def test_a_chat_without_a_template_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(Unreadable, match="has no chat template"):
        answers(tokenizer, Example([], [TALK]))


def test_what_a_template_says_of_a_row_that_it_refuses_is_told(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Unreadable, match="roles must alternate"):
        answers(tokenizer, Example([], [TALK]))


def test_a_tokenizer_that_ends_its_texts_ends_no_prompt(tokenizer: Any) -> None:
    ending = copy.deepcopy(tokenizer)
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert ending("1").input_ids[-1] == tokenizer.eos_token_id
    assert answers(ending, Example("1+2=", ["3"])) == [("<bos>1+2=", "3$", "3$")]
    assert answers(ending, Example("<bos>1+2=", ["3"])) == [("<bos>1+2=", "3$", "3$")]


def test_a_reward_models_records_are_whole_texts(tokenizer: Any) -> None:
    """Together they hold exactly what the reward ``torch`` reads, and share what is common."""
    pair = encode_texts(RememberingTokenizer(tokenizer), Example("1+2=", ["3", "34"]), padding=None)
    assert [shown(tokenizer, one)[:2] for one in pair] == [("<bos>1+2=", "3"), ("<bos>1+2=", "34")]
    for one, text in zip(pair, ("1+2=3", "1+2=34"), strict=True):
        ids = np.concatenate([one.prompt, one.actions])
        np.testing.assert_array_equal(ids, tokenizer(text).input_ids)
        assert one.mask.all()
    tokenizer.chat_template = PLAIN
    (chat,) = encode_texts(
        RememberingTokenizer(tokenizer), Example(TALK[:1], [TALK[1:2]]), padding=None
    )
    assert "".join(shown(tokenizer, chat)[:2]) == "n=12$+y=345$+"


@pytest.mark.parametrize("padding", [None, 0, 2])
def test_a_reward_model_is_trained_at_the_last_token_that_is_no_padding(
    tokenizer: Any, padding: int | None
) -> None:
    """2 is the end token, with which the template ends each turn."""
    tokenizer.chat_template = PLAIN.replace("<eos>+", "<eos>")
    (chat,) = encode_texts(
        RememberingTokenizer(tokenizer), Example(TALK[:1], [TALK[1:2]]), padding=padding
    )
    end = "" if padding == 2 else "$"
    assert "".join(shown(tokenizer, chat)[:2]) == f"n=12$y=345{end}"


def test_a_reward_models_text_of_padding_alone_keeps_a_token(tokenizer: Any) -> None:
    remembering = RememberingTokenizer(tokenizer)
    (text,) = encode_texts(remembering, Example("", ["<bos>"]), padding=1)
    assert len(text) == 1


def test_a_reward_models_text_begins_once(tokenizer: Any) -> None:
    """As a policy is asked, so that a reward model is of the same tokens."""
    remembering = RememberingTokenizer(tokenizer, added_tokens(tokenizer))
    (text,) = encode_texts(remembering, Example("<bos>1+2=", ["3"]), padding=None)
    assert shown(tokenizer, text)[:2] == ("<bos>1+2=", "3")
