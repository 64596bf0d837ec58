"""What a chat template writes: nothing that no row has, and all that one has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_language.chats import Chats, Unreadable
from gcore_language.tiny import save_tokenizer

_EACH = "{% for m in messages %}[{{ m.role }}]"
_OPENS = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
#: Writes a content as it is.
TEXTS = _EACH + "{{ m['content'] }}" + _OPENS
#: Goes through parts; of a text it writes nothing.
PARTS = (
    _EACH + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% if p.type == 'image' %}<image>{% endif %}{% endfor %}" + _OPENS
)
#: Knows both.
BOTH = (
    _EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}" + _OPENS
)
#: Knows both, but writes the content of a system turn as it is.
SYSTEM_TEXTS = BOTH.replace("m.content is string", "m.content is string or m.role == 'system'")
#: Calls of tools as JSON where the arguments are objects, and null where there is no content.
_CALLS = "{% for c in m.tool_calls %}{{ c.function.name }}{{ ARGUMENTS }}{% endfor %}"
CALLS_OBJECT = TEXTS.replace(
    _OPENS, _CALLS.replace("ARGUMENTS", "c.function.arguments | tojson") + _OPENS
)
CALLS_TEXT = TEXTS.replace(_OPENS, _CALLS.replace("ARGUMENTS", "c.function.arguments") + _OPENS)
CALLS_NULL = CALLS_OBJECT.replace(
    "{{ m['content'] }}", "{% if m.content is not none %}{{ m['content'] }}{% endif %}"
)
CALLED = {"x": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def chats(tokenizer: Any, template: str | None) -> Chats:
    tokenizer.chat_template = template
    return Chats(tokenizer)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("template", [TEXTS, PARTS, BOTH, SYSTEM_TEXTS])
@pytest.mark.parametrize("content", ["one", [text("one")], [{"text": "one", "type": "text"}]])
def test_a_text_is_written_whatever_form_row_and_template_have(
    tokenizer: Any, template: str, content: Any
) -> None:
    turns = [{"role": "system", "content": content}, user(content)]
    assert chats(tokenizer, template).asked(turns) == "[system]one[user]one[assistant]"


@pytest.mark.parametrize(
    ("template", "written"), [(TEXTS, "one\ntwo"), (PARTS, "onetwo"), (BOTH, "onetwo")]
)
def test_a_template_that_knows_texts_alone_gets_the_parts_joined(
    tokenizer: Any, template: str, written: str
) -> None:
    asked = chats(tokenizer, template).asked([user([text("one"), text("two")])])
    assert asked == f"[user]{written}[assistant]"


@pytest.mark.parametrize("template", [PARTS, BOTH])
def test_a_place_of_an_image_stays_a_part(tokenizer: Any, template: str) -> None:
    turns = [user([{"type": "image"}, text("what is it?")])]
    assert chats(tokenizer, template).asked(turns) == "[user]<image>what is it?[assistant]"


def test_a_place_of_an_image_is_refused_by_a_template_of_texts(tokenizer: Any) -> None:
    with pytest.raises(Unreadable, match="it shows images, and the chat template knows none"):
        chats(tokenizer, TEXTS).asked([user([{"type": "image"}, text("what is it?")])])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "its content is null"),
        (5, "its content is a number"),
        (True, "its content is true or false"),
        ({"text": "one"}, "its content is an object"),
        (["one"], "a part of its content is no object"),
        ([{"type": "text"}], "a part of type text has no text"),
        ([{"type": "text", "text": None}], "a part of type text has no text"),
        ([{"text": "one"}], "it has a part of type null"),
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "it has a part of type image_url.*data.config",
        ),
        ([{"type": "image", "image": "one.png"}], "a part of type image has image.*data.config"),
        ([{"type": "input_image"}], "it has a part of type input_image.*data.config.images"),
        ([{"type": "video"}], 'it has a part of type "video"; there are text and image'),
    ],
)
def test_a_content_that_is_no_text_is_refused(tokenizer: Any, content: Any, said: str) -> None:
    for written in (chats(tokenizer, TEXTS).asked, chats(tokenizer, TEXTS).written):
        with pytest.raises(Unreadable, match=rf"^turn 0 \(user\): {said}"):
            written([user(content)])


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([user("1+1"), {"role": "assistant", "content": "2"}], "ends with the assistant's answer"),
        ([user("1+1"), {"role": "Assistant", "content": ""}], "ends with the assistant's answer"),
        ([user("1+1"), {"role": "model", "content": "2"}], "ends with the assistant's answer"),
        ([{"role": "assistant", "content": "2"}], "ends with the assistant's answer"),
        ([user("")], "its last turn .user. is empty"),
        ([user(" \n")], "its last turn .user. is empty"),
        ([user([])], "its last turn .user. is empty"),
        ([user([text("")])], "its last turn .user. is empty"),
        ([], "the chat has no turn"),
    ],
)
def test_a_chat_that_asks_nothing_is_not_sampled(
    tokenizer: Any, turns: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(Unreadable, match=said):
        chats(tokenizer, TEXTS).asked(turns)


def test_who_answers_is_seen_by_how_the_template_opens_a_turn(tokenizer: Any) -> None:
    pirate = chats(tokenizer, TEXTS.replace("[assistant]", "[pirate]"))
    with pytest.raises(Unreadable, match="it ends with a turn of 'pirate', whom the template has"):
        pirate.asked([user("hail"), {"role": "pirate", "content": "ahoy"}])
    asked = pirate.asked([user("hail"), {"role": "sailor", "content": "ahoy"}])
    assert asked == "[user]hail[sailor]ahoy[pirate]"


def test_a_chat_with_its_answer_can_be_written_where_nothing_is_sampled(tokenizer: Any) -> None:
    turns = [user("1+1"), {"role": "assistant", "content": "2"}]
    assert chats(tokenizer, TEXTS).written(turns) == "[user]1+1[assistant]2"


@pytest.mark.parametrize("arguments", [CALLED, json.dumps(CALLED)])
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("template", [CALLS_OBJECT, CALLS_TEXT, CALLS_NULL])
def test_calls_of_tools_are_written_once_as_json_and_never_as_none(
    tokenizer: Any, template: str, content: str | None, arguments: Any
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [
        user("1+1"),
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    asked = chats(tokenizer, template).asked(turns)
    assert asked == '[user]1+1[assistant]add{"x": 1}[tool]2[assistant]'


def test_keys_without_a_value_are_no_part_of_a_turn(tokenizer: Any) -> None:
    """As a table has them, in which every turn has all keys."""
    template = TEXTS.replace("{{ m['content'] }}", "{{ m | list }}{{ m['content'] }}")
    asked = chats(tokenizer, template).asked(
        [user("content") | {"name": None, "tool_calls": []}],
    )
    assert asked == "[user]['role', 'content']content[assistant]"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "it is a chat, and the tokenizer has no chat template"),
        ("", "it is a chat, and the tokenizer has no chat template"),
        ("{{ raise_exception('no system') }}", "the chat template refuses it: no system"),
        ("{{ messages[0].a.b }}", "the chat template refuses it: .*'a'"),
        ("{% if %}", "the chat template refuses it: Expected an expression"),
        ("{{ messages[0].content + 1 }}", "the chat template refuses it: can only concatenate"),
        ("{{ 1 // 0 }}", "the chat template refuses it: integer division"),
        ("{{ messages | frobnicate }}", "the chat template refuses it: No filter named"),
        ("hello", "the chat template leaves out turn 0 .user."),
        (_EACH + "{{ m.content | tojson }}" + _OPENS, None),
    ],
)
def test_a_template_that_cannot_write_a_chat_is_told_in_its_words(
    tokenizer: Any, template: str | None, said: str | None
) -> None:
    wanted = chats(tokenizer, template)
    if said is None:
        assert wanted.asked([user("one")]) == '[user]"one"[assistant]'
        return
    with pytest.raises(Unreadable, match=said):
        wanted.asked([user("one")])


def test_a_template_that_leaves_out_a_turn_is_refused(tokenizer: Any) -> None:
    template = TEXTS.replace(
        "{{ m['content'] }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}"
    )
    with pytest.raises(Unreadable, match=r"leaves out turn 0 \(system\)"):
        chats(tokenizer, template).asked([{"role": "system", "content": "be brief"}, user("1")])


OWN_SYSTEM = TEXTS.replace(
    "{{ m['content'] }}", "{{ 'be a help' if m.role == 'system' else m.content }}"
)
LAST_ALONE = "[user]{{ messages[-1].content }}{% if add_generation_prompt %}[assistant]{% endif %}"
NO_TOOLS = CALLS_OBJECT.replace(
    "{{ m['content'] }}", "{% if m.role != 'tool' %}{{ m.content or '' }}{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "a", "arguments": {}}]}


@pytest.mark.parametrize(
    ("template", "turns", "said"),
    [
        (OWN_SYSTEM, [{"role": "system", "content": "be rude"}, user("hail")], r"0 \(system\)"),
        (
            LAST_ALONE,
            [user("a 1"), {"role": "assistant", "content": "2"}, user("a 1")],
            r"0 \(user",
        ),
        (NO_TOOLS, [user("1+1=2"), CALL, {"role": "tool", "content": "2"}], r"2 \(tool\)"),
        (TEXTS, [user("a b"), CALL, user("c")], r"the calls of tools of turn 1 \(assistant\)"),
    ],
    ids=["a-system-turn-of-its-own", "the-last-alone", "no-tools", "no-calls"],
)
def test_a_turn_is_missed_whose_words_stand_elsewhere(
    tokenizer: Any, template: str, turns: list[dict[str, Any]], said: str
) -> None:
    if "tool_calls" in template:
        template = template.replace("c.function", "c")
    for write in (chats(tokenizer, template).asked, chats(tokenizer, template).marked):
        with pytest.raises(Unreadable, match=f"leaves out .*{said}"):
            write(turns)


def test_a_template_that_takes_no_longer_text_leaves_out_nothing(tokenizer: Any) -> None:
    """Here it refuses a tool's answer of more than one letter."""
    short = "{% if m.role == 'tool' and m.content | length > 1 %}{{ 1 // 0 }}{% endif %}"
    turns = [{"role": "system", "content": "s"}, user("1"), {"role": "tool", "content": "2"}]
    template = TEXTS.replace("[{{ m.role", short + "[{{ m.role")
    assert chats(tokenizer, template).asked(turns) == "[system]s[user]1[tool]2[assistant]"
    without = template.replace("{{ m['content']", "{{ '' if m.role == 'system' else m['content']")
    with pytest.raises(Unreadable, match=r"leaves out turn 0 \(system\)"):
        chats(tokenizer, without).asked(turns)


def test_a_template_that_writes_capitals_leaves_out_nothing(tokenizer: Any) -> None:
    loud = TEXTS.replace("m['content']", "m['content'] | upper")
    assert chats(tokenizer, loud).asked([user("one")]) == "[user]ONE[assistant]"


def test_which_turns_are_left_out_is_found_once_for_chats_of_the_same_turns(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = chats(tokenizer, TEXTS)
    wanted.asked([user("1")])
    rendered: list[Any] = []
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer,
        "apply_chat_template",
        lambda turns, **more: rendered.append(turns) or apply(turns, **more),
    )
    wanted.asked([user("2")])
    assert rendered == [[user("2")]]


@pytest.mark.parametrize("arguments", [CALLED, json.dumps(CALLED)])
def test_a_chat_with_marks_is_written_as_one_without(tokenizer: Any, arguments: Any) -> None:
    marked = CALLS_OBJECT.replace(_EACH, _EACH + "{% generation %}").replace(
        "{% endfor %}" + _OPENS, "{% endfor %}{% endgeneration %}" + _OPENS
    )
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [user([text("1")]), {"role": "assistant", "content": None, "tool_calls": [call]}]
    wanted = chats(tokenizer, marked)
    ids, _ = wanted.marked(turns)
    plain = tokenizer(wanted.written(turns), add_special_tokens=False).input_ids
    assert ids == plain
    assert wanted.written(turns) == '[user]1[assistant]add{"x": 1}'


def test_variables_of_the_template_reach_it(tokenizer: Any) -> None:
    tokenizer.chat_template = TEXTS + "{{ thinking }}"
    assert Chats(tokenizer, {"thinking": "hm"}).asked([user("1")]) == "[user]1[assistant]hm"
