"""Tests what is read out of a turn, in the format of each family of models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gcore_environments.parsers import PARSERS, choose_parser
from hypothesis import given, settings
from hypothesis import strategies as st

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "most": {"type": "integer"},
                    "deep": {"type": "boolean"},
                },
            },
        },
    }
]
ARGUMENTS = {"text": "7", "most": 3, "deep": True}
JSON = json.dumps(ARGUMENTS)

#: Parser -> turns that all say the call above once.
CALLS: dict[str, list[str]] = {
    "hermes": [
        f'<tool_call>\n{{"name": "find", "arguments": {JSON}}}\n</tool_call>',
        f'<tool_call>{{"name": "find", "arguments": {json.dumps(JSON)}}}</tool_call>',
    ],
    "qwen3_xml": [
        "<tool_call>\n<function=find>\n<parameter=text>\n7\n</parameter>\n<parameter=most>\n3\n"
        "</parameter>\n<parameter=deep>\ntrue\n</parameter>\n</function>\n</tool_call>",
    ],
    "glm": [
        "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>7</arg_value>\n<arg_key>most</arg_key>"
        "\n<arg_value>3</arg_value>\n<arg_key>deep</arg_key>\n<arg_value>True</arg_value>\n"
        "</tool_call>",
    ],
    "minimax": [
        '<minimax:tool_call>\n<invoke name="find">\n<parameter name="text">7</parameter>\n'
        '<parameter name="most">3</parameter>\n<parameter name="deep">true</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    ],
    "kimi": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>"
        f"{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "llama3": [
        f'{{"name": "find", "parameters": {JSON}}}',
        f'<|python_tag|>{{"type": "function", "name": "find", "parameters": {JSON}}}',
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "find", "arguments": {JSON}}}]',
        f"[TOOL_CALLS]find{JSON}",
        f"[TOOL_CALLS]find[CALL_ID]abcdefghi[ARGS]{JSON}",
    ],
    "harmony": [
        f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{JSON}",
        f" to=functions.find<|channel|>commentary json<|message|>{JSON}",
    ],
}
#: Parser -> turns with a call that cannot be read.
BROKEN: dict[str, list[str]] = {
    "hermes": ["<tool_call>{</tool_call>", '<tool_call>{"name": "find"'],
    "qwen3_xml": [
        "<tool_call>find(7)</tool_call>",
        "<tool_call><function=find><parameter=text>7</function></tool_call>",
        "<tool_call><function=find>",
    ],
    "glm": ["<tool_call></tool_call>", "<tool_call>find<arg_key>text</arg_key></tool_call>"],
    "minimax": ["<minimax:tool_call>find</minimax:tool_call>", "<minimax:tool_call><invoke"],
    "kimi": [
        "<|tool_call_begin|>functions.find:0<|tool_call_end|>",
        "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{<|tool_call_end|>",
    ],
    "deepseek": [
        "<｜tool▁call▁begin｜>find<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{<｜tool▁call▁end｜>",
    ],
    "llama3": ['{"name": "find", "parameters": {', "<|python_tag|>find.call(7)"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][{]", "[TOOL_CALLS]find{", "[TOOL_CALLS][7]"],
    "harmony": ["<|channel|>commentary to=functions.find<|message|>{"],
}
#: What a policy may say in any order, in part or whole.
PIECES = sorted(
    {text for parser in PARSERS for pair in parser.pairs for text in pair}
    | {text for cases in (CALLS, BROKEN) for texts in cases.values() for text in texts}
    | {"<|message|>", "<|start|>assistant", "<|channel|>final", "[CALL_ID]", "[ARGS]", "[", "]"}
    | {"{", "}", '"name"', "null", "find", "<function=", "<arg_key>", "<|python_tag|>", "[" * 3000}
)


def cases(table: dict[str, list[str]]) -> list[Any]:
    return [pytest.param(name, text, id=name) for name in table for text in table[name]]


def test_every_parser_has_its_cases() -> None:
    assert set(CALLS) == set(BROKEN) == {parser.name for parser in PARSERS}


@pytest.mark.parametrize(("name", "text"), cases(CALLS))
def test_a_call_is_read_with_the_types_of_its_tool(name: str, text: str) -> None:
    read = choose_parser(name).read(text, TOOLS)
    (call,) = read.calls
    assert call.is_read
    assert (call.name, json.loads(call.arguments)) == ("find", ARGUMENTS)
    assert read.text == ""


@pytest.mark.parametrize(("name", "text"), cases(CALLS))
def test_what_is_said_and_thought_before_a_call_is_kept_apart(name: str, text: str) -> None:
    if name == "harmony":
        before = (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>so<|end|><|start|>assistant"
        )
    elif name == "mistral":
        before = "[THINK]hm[/THINK]so"
    else:
        before = "<think>\nhm\n</think>\n\n" + ("" if name == "llama3" else "so\n")
    read = choose_parser(name).read(before + text, TOOLS)
    assert (read.reasoning, len(read.calls)) == ("hm", 1)
    assert read.text == ("" if name == "llama3" else "so")


@pytest.mark.parametrize(("name", "text"), cases(BROKEN))
def test_a_call_that_cannot_be_read_is_one_with_what_was_said(name: str, text: str) -> None:
    (call,) = choose_parser(name).read(text, TOOLS).calls
    assert not call.is_read
    assert call.arguments in text


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_turn_without_a_call_is_text_as_it_was_said(parser: Any) -> None:
    for text in ("yes", " {} \n", "", "a < b", '{"a": 1}', "7", "find(7)"):
        read = parser.read(text, TOOLS)
        assert (read.text, read.reasoning, read.calls) == (text, "", ())


def test_several_calls_are_read_in_order() -> None:
    for name, texts in CALLS.items():
        joint = {"llama3": "; ", "harmony": "<|call|><|start|>assistant"}.get(name, "\n")
        read = choose_parser(name).read(joint.join([texts[0], texts[0]]), TOOLS)
        if name == "mistral":
            continue  # its old form has one list
        assert [call.name for call in read.calls] == ["find", "find"], name


def test_mistral_says_several_calls_in_one_list_or_one_behind_the_other() -> None:
    one = f'{{"name": "find", "arguments": {JSON}}}'
    for text in (f"[TOOL_CALLS][{one}, {one}]", f"[TOOL_CALLS]find{JSON}[TOOL_CALLS]find{JSON}"):
        assert [c.name for c in choose_parser("mistral").read(text).calls] == ["find", "find"]


def test_a_call_keeps_the_id_that_the_policy_gave_it() -> None:
    assert choose_parser("kimi").read(CALLS["kimi"][0]).calls[0].id == "functions.find:0"
    assert choose_parser("mistral").read(CALLS["mistral"][2]).calls[0].id == "abcdefghi"


def test_a_value_stays_text_where_its_tool_says_so() -> None:
    for name in ("qwen3_xml", "glm", "minimax"):
        (call,) = choose_parser(name).read(CALLS[name][0], ()).calls
        assert json.loads(call.arguments)["text"] == 7
        (call,) = choose_parser(name).read(CALLS[name][0], TOOLS).calls
        assert json.loads(call.arguments)["text"] == "7"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|channel|>", "harmony"),
        ("<tool_call><arg_key>", "glm"),
        ("<tool_call>\n<function=", "qwen3_xml"),
        ("<tool_call>", "hermes"),
        ("<minimax:tool_call>", "minimax"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("<|tool_call_begin|>", "kimi"),
        ("", "hermes"),
    ],
)
def test_the_parser_is_told_by_the_templates_own_text(template: str, name: str) -> None:
    assert choose_parser("auto", template).name == name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=8))
def test_nothing_that_a_policy_says_raises(pieces: list[str]) -> None:
    for parser in PARSERS:
        read = parser.read("".join(pieces), TOOLS)
        for call in read.calls:
            if call.is_read:
                assert call.name and isinstance(json.loads(call.arguments), dict)
