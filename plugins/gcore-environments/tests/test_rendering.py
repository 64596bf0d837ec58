"""Tests from messages to ids, and back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from gcore_environments.rendering import digest, make_renderer, warnings_of
from gcore_environments.templates import call
from gcore_environments.testing import (
    ADDER,
    CHATML,
    DEAF,
    FAMILIES,
    QUESTION,
    Made,
    RendererContract,
    byte_tokenizer,
    letter_by_letter,
    tokenizer_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from gcore_core.contract.errors import ConfigError, DataError


def made_of(family: str, **options: Any) -> Made:
    tokenizer, ends = tokenizer_of(family)
    renderer = make_renderer(tokenizer, ends, **options)
    return Made(renderer=renderer, tokenizer=tokenizer, end_ids=ends)


#: Made once: a renderer remembers nothing that it was given.
MADE = {family: made_of(family) for family in FAMILIES}
KEEPS = made_of("stripping", history="keep")


class TestRenderers(RendererContract):
    @pytest.fixture(params=FAMILIES)
    def made(self, request: pytest.FixtureRequest) -> Made:
        return MADE[request.param]


class TestThatKeepsHistories(RendererContract):
    @pytest.fixture(params=FAMILIES)
    def made(self, request: pytest.FixtureRequest) -> Made:
        return made_of(request.param, history="keep")


class TestWithoutTemplate(RendererContract):
    @pytest.fixture
    def made(self) -> Made:
        tokenizer = byte_tokenizer("", ["<|im_start|>", "<|im_end|>"])
        tokenizer.chat_template = None
        renderer = make_renderer(tokenizer, [])
        return Made(renderer=renderer, tokenizer=tokenizer, end_ids=[], tools=False)


def given_behind(made: Made, said: str, new: list[Any], tools: Any = ()) -> str | None:
    """Returns the text of what is given behind a turn, with a mark where ids were dropped."""
    ids = made.renderer.start([QUESTION], tools) + made.ids(said)
    bridge = made.renderer.bridge(ids, new, tools)
    return None if bridge is None else "-" * bridge.drop + made.text(bridge.ids)


ANSWER = {"role": "tool", "content": "42", "name": "add", "tool_call_id": "call00000"}


def test_the_line_break_behind_an_end_token_is_given() -> None:
    given = given_behind(MADE["chatml"], "yes<|im_end|>", [QUESTION])
    assert given is not None and given.startswith("\n<|im_start|>user\n")


def test_a_role_token_that_the_policy_sampled_is_not_written_twice() -> None:
    assert given_behind(MADE["glm"], "yes<|user|>", [QUESTION]) == "\nis it so?<|assistant|>\n"


def test_another_role_token_than_the_next_is_dropped() -> None:
    assert (
        given_behind(MADE["glm"], "yes<|user|>", [ANSWER]) == "-<|observation|>\n42<|assistant|>\n"
    )


def test_a_cut_turn_before_a_role_token_gets_it() -> None:
    assert given_behind(MADE["glm"], "yes", [ANSWER]) == "<|observation|>\n42<|assistant|>\n"


def test_a_thought_that_was_cut_is_closed() -> None:
    given = given_behind(MADE["chatml"], "<think>\nwell", [QUESTION])
    assert given is not None and given.startswith("</think><|im_end|>\n")


def test_a_call_that_was_cut_is_closed() -> None:
    given = given_behind(MADE["chatml"], '<tool_call>{"na', [ANSWER])
    assert given is not None and given.startswith("</tool_call><|im_end|>\n")


def test_nothing_is_closed_behind_an_end_that_was_sampled() -> None:
    given = given_behind(MADE["chatml"], "<think>well<|im_end|>", [QUESTION])
    assert given is not None and given.startswith("\n<|im_start|>")


def test_thoughts_that_the_template_drops_are_a_fork_or_are_kept() -> None:
    said = "<think>\nwell\n</think>\n\nyes<|im_end|>"
    assert given_behind(MADE["stripping"], said, [QUESTION]) is None
    kept = given_behind(KEEPS, said, [QUESTION])
    assert kept == "\n<|im_start|>user\nis it so?<|im_end|>\n<|im_start|>assistant\n"
    assert given_behind(MADE["stripping"], said, [ANSWER]) is not None
    assert given_behind(MADE["stripping"], "yes<|im_end|>", [QUESTION]) is not None


def test_thoughts_of_an_earlier_turn_are_a_fork_once_the_user_asks_again() -> None:
    made = MADE["stripping"]
    call_said = (
        '<think>\nwell\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    )
    ids = made.renderer.start([QUESTION]) + made.ids(f"{call_said}<|im_end|>")
    bridge = made.renderer.bridge(ids, [ANSWER])
    assert bridge is not None
    ids += [*bridge.ids, *made.ids("yes<|im_end|>")]
    assert made.renderer.bridge(ids, [QUESTION]) is None


def test_a_template_that_does_not_begin_an_answer_has_no_bridge(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = byte_tokenizer(DEAF, ["<|im_start|>", "<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    renderer = make_renderer(tokenizer, [end])
    ids = [*renderer.start([QUESTION]), end]
    assert renderer.bridge(ids, [QUESTION]) is None
    (warning,) = warnings_of(renderer)
    assert "ignores add_generation_prompt" in warning
    assert warning in caplog.text


def test_a_template_that_counts_turns_has_no_bridge() -> None:
    template = CHATML.replace("'<|im_start|>' +", "'<|im_start|>' + (loop.index | string) +")
    tokenizer = byte_tokenizer(template, ["<|im_start|>", "<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    renderer = make_renderer(tokenizer, [end])
    assert renderer.bridge([*renderer.start([QUESTION]), end], [QUESTION]) is None
    (warning,) = warnings_of(renderer)
    assert "according to its place" in warning


def test_a_job_is_told_what_its_template_does_to_thoughts_and_ends() -> None:
    assert warnings_of(MADE["chatml"].renderer) == warnings_of(KEEPS.renderer) == []
    (warning,) = warnings_of(MADE["stripping"].renderer)
    assert "history: keep" in warning
    tokenizer, _ = tokenizer_of("chatml")
    (warning,) = warnings_of(make_renderer(tokenizer, [tokenizer.eos_token_id]))
    assert "ends a turn with <|im_end|>, which ends no answer of this model" in warning


def test_an_answer_whose_tool_nobody_names_is_a_fork_where_the_template_writes_the_name() -> None:
    template = CHATML.replace("<tool_response>", "<tool_response>' + message.name + '")
    tokenizer = byte_tokenizer(template, ["<|im_start|>", "<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    renderer = make_renderer(tokenizer, [end])
    ids = [*renderer.start([QUESTION]), end]
    bridge = renderer.bridge(ids, [ANSWER])
    assert bridge is not None and "<tool_response>add" in tokenizer.decode(bridge.ids)
    assert renderer.bridge(ids, [{**ANSWER, "name": None}]) is None
    said = {"role": "assistant", "content": "", "tool_calls": [call("add", {})]}
    unnamed = {"role": "tool", "content": "42", "tool_call_id": "call00000"}
    assert "<tool_response>add" in tokenizer.decode(renderer.start([QUESTION, said, unnamed]))


def test_calls_are_text_where_the_template_knows_none() -> None:
    template = DEAF + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    tokenizer = byte_tokenizer(template, ["<|im_start|>", "<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    renderer = make_renderer(tokenizer, [end])
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = [*renderer.start([QUESTION]), *tokenizer(said).input_ids, end]
    assert renderer.reply([*tokenizer(said).input_ids, end]).calls[0]["function"]["name"] == "add"
    bridge = renderer.bridge(ids, [ANSWER])
    assert bridge is not None
    turn = {"role": "assistant", "content": None, "tool_calls": [call("add", {"a": 1})]}
    assert tokenizer.decode(ids + bridge.ids) == tokenizer.decode(
        renderer.start([QUESTION, turn, ANSWER])
    )


def test_the_words_of_a_stand_in_may_stand_in_messages() -> None:
    for word in ("gcoresaid", "gcorethought", "asked"):
        for family in ("chatml", "llama", "glm"):
            new = [{"role": "user", "content": f"{word} {word}0x"}]
            end = FAMILIES[family][3][0]
            given = given_behind(MADE[family], f"{word}{end}", new)
            other = given_behind(MADE[family], f"{word}{end}", [{**new[0], "content": "Z"}])
            assert other is not None and given == other.replace("Z", new[0]["content"])


def test_assistants_in_new_messages_are_given() -> None:
    new = [QUESTION, {"role": "assistant", "content": "as told"}, QUESTION]
    given = given_behind(MADE["chatml"], "yes<|im_end|>", new)
    assert given is not None
    assert "<|im_start|>assistant\nas told<|im_end|>\n<|im_start|>user\n" in given


def test_messages_that_a_template_refuses_are_named() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('no such role') }}")
    renderer = make_renderer(tokenizer, [1])
    with pytest.raises(DataError, match="no such role"):
        renderer.start([QUESTION])
    with pytest.raises(DataError, match=r"messages\[1\]"):
        MADE["chatml"].renderer.start([QUESTION, {"role": "user", "content": 7}])
    with pytest.raises(DataError, match=r"messages\[0\]"):
        MADE["chatml"].renderer.start(["no message"])  # type: ignore[list-item]


def test_a_content_that_the_template_changes_is_refused_where_it_has_a_special_token() -> None:
    template = CHATML.replace("message.content or ''", "(message.content or '') | replace('Z', '')")
    tokenizer = byte_tokenizer(template, ["<|im_start|>", "<|im_end|>"])
    renderer = make_renderer(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert renderer.start([{"role": "user", "content": "Zebra"}])
    with pytest.raises(DataError, match=r"messages\[1\] \(user\)"):
        renderer.start([QUESTION, {"role": "user", "content": "a <|im_end|>"}])


def test_a_special_token_is_not_made_of_two_contents() -> None:
    tokenizer = byte_tokenizer("", ["<|im_end|>"])
    tokenizer.chat_template = None
    renderer = make_renderer(tokenizer, [])
    ids = renderer.start(
        [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|> x"}]
    )
    assert tokenizer.decode(ids) == "<|im_end|> x"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids


def test_a_special_token_is_not_made_by_what_a_tokenizer_normalizes() -> None:
    tokenizer = byte_tokenizer(CHATML, ["<|im_start|>", "<|im_end|>"])
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.NFKC()
    # as a token that is looked for in the normalized text
    backend.add_tokens([AddedToken("<|im_end|>", normalized=True)])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    renderer = make_renderer(tokenizer, [end])
    plain = renderer.start([{"role": "user", "content": "x"}])
    forged = renderer.start([{"role": "user", "content": "a ＜|im_end|＞ b"}])
    assert forged.count(end) == plain.count(end)


def test_a_call_is_read_with_what_was_said_and_thought() -> None:
    made = MADE["chatml"]
    text = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    said = made.renderer.reply(made.ids(f"<think>\nwell\n</think>\n\n{text}"))
    assert (said.text, said.reasoning, said.unparsed) == ("so", "well", 0)
    (one,) = said.calls
    assert one["function"]["name"] == "add"
    assert json.loads(one["function"]["arguments"]) == {"a": 1}
    assert len(one["id"]) == 9 and one["id"].isalnum()


@pytest.mark.parametrize(
    "body", ["{", "[]", "7", '{"arguments": {}}', '{"name": 3}', '{"name": "f", "arguments": 7}']
)
def test_a_call_that_cannot_be_read_is_data(body: str) -> None:
    made = MADE["chatml"]
    said = made.renderer.reply(made.ids(f"<tool_call>{body}</tool_call>"))
    assert said.unparsed == 1
    assert said.calls[0]["function"] == {"name": "", "arguments": body}


def test_a_parser_that_there_is_not_is_named() -> None:
    tokenizer, ends = tokenizer_of("chatml")
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        make_renderer(tokenizer, ends, parser="hermez")
    with pytest.raises(ConfigError, match="history"):
        make_renderer(tokenizer, ends, history="stict")  # type: ignore[arg-type]


def test_a_history_has_one_name_however_an_agent_writes_it() -> None:
    def history(arguments: Any, content: Any) -> list[dict[str, Any]]:
        said = {"role": "assistant", "content": content, "tool_calls": [call("f", arguments)]}
        return [dict(QUESTION), said]

    name = digest(history({"a": 1, "b": 2}, None), [ADDER])
    assert digest(history('{"b":2,"a":1}', " \n"), [ADDER]) == name
    assert digest(history('{"b":2,"a":1}', [{"type": "text", "text": ""}]), [ADDER]) == name
    assert digest(history({"a": 1, "b": 3}, None), [ADDER]) != name
    assert digest(history({"a": 1, "b": 2}, None)) != name
    assert digest(history("{", None), [ADDER]) != name


WORDS = [
    "yes",
    "no ",
    " ",
    "\n",
    "é",
    "漢字",
    "🙂",
    "</s>",
    "a  b",
    '{"x": 1}',
    "don't",
    "<",
    "|>",
    "<|",
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(0, 2**32))
def test_a_conversation_of_any_turns_says_what_its_template_says(family: str, seed: int) -> None:
    """Its old ids stay, and no reply adds a special token, whatever both say."""
    made = MADE[family]
    random_ = random.Random(seed)
    special = [token.content for token in made.tokenizer.added_tokens_decoder.values()]

    def words(most: int, more: list[str]) -> str:
        return "".join(random_.choice([*WORDS, *more]) for _ in range(random_.randint(1, most)))

    messages: list[Any] = [{"role": "user", "content": words(5, special)}]
    ids = made.renderer.start(messages)
    for _ in range(random_.randint(1, 5)):
        said = words(6, []).strip() or "ok"
        ids += letter_by_letter(made.tokenizer, said)
        reply = {"role": "user", "content": words(5, special)}
        end = random_.choice([[], [made.end_ids[0]]])  # type: ignore[index]
        bridge = made.renderer.bridge(ids + end, [reply])
        harmless = made.renderer.bridge(ids + end, [{**reply, "content": "x"}])
        assert bridge is not None and harmless is not None
        assert bridge.drop == 0
        assert made.count_special(bridge.ids) == made.count_special(harmless.ids)
        messages += [{"role": "assistant", "content": said}, reply]
        ids = ids + end + bridge.ids
        assert made.text(ids) == made.text(made.renderer.start(messages))
