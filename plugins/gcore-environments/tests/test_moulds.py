"""What is filled into the mould of a conversation is what its chat template writes of it."""

from __future__ import annotations

from typing import Any

import pytest
from gcore_environments.moulds import Moulds, looks_of
from gcore_environments.templates import ASKED, RefusedByTemplate, Template, call
from gcore_environments.testing import CHATML, FAMILIES, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

#: Looks at contents in the ways that models' templates do.
LOOKING = """
{%- for message in messages %}
{%- if message.role == 'tool' and message.tool_call_id|length != 9 %}
{{- raise_exception('id') }}{% endif %}
{%- set content = message.content | trim %}
{%- if content.startswith('<tool>') %}{{ '[tool]' }}{% endif %}
{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if content == 'none' %}{{ '[none]' }}{% elif content %}
{{- message.role + ': ' + content }}{% endif %}
{%- for one in messages %}{% if one.content == message.content %}={% endif %}{% endfor %}
{{- message.tool_call_id }}{{ message.tool_calls | tojson if message.tool_calls }}{{ '|' }}
{%- endfor %}
"""
SOURCES = {name: family[0] for name, family in FAMILIES.items()} | {"looking": LOOKING}


class Counting(Template):
    """Counts how often it is rendered."""

    count = 0

    def write(self, *words: Any, **named: Any) -> str:
        self.count += 1
        return super().write(*words, **named)


def template_of(source: str) -> Counting:
    tokenizer, _ = tokenizer_of("chatml")
    tokenizer.chat_template = source
    return Counting(tokenizer, {})


class Uncompared(Moulds):
    """Never compares what it fills in with what the template writes: the tests do."""

    def _is_compared(self, shape: str) -> bool:
        return False


TEMPLATES = {name: template_of(source) for name, source in SOURCES.items()}
#: Kept over all examples, so that each fills what others have made.
MOULDS = {
    name: Uncompared(template, looks_of(template.source), ())
    for name, template in TEMPLATES.items()
}
WORDS = ["yes", "42", " ", "\n", "é漢🙂", '"', "\\", "\x01", "{x}", "<", "<tool>", "</think>"]
WORDS += ["none", "asked", "<|im_end|>", "tool", "c00000001", "x" * 4000, "\0", "aZ0q", "Zq0100000"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=3).map("".join)
IDS = st.sampled_from(["c00000001", "c00000002", "call00000", "functions.f:0", "short"])
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXTS}),
        st.fixed_dictionaries(
            {"role": st.just("tool"), "content": TEXTS, "name": st.just("f"), "tool_call_id": IDS}
        ),
    ),
    max_size=3,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(SOURCES)), MESSAGES, st.lists(IDS, max_size=2), st.booleans())
def test_what_is_filled_in_is_what_the_template_writes(
    name: str, new: list[dict[str, Any]], ids: list[str], opens: bool
) -> None:
    said: dict[str, Any] = {"role": "assistant", "content": "" if ids else "said"}
    if ids:
        said["tool_calls"] = [call("f", {"x": "said"}, id) for id in ids]

    def outcome(write: Any, *words: Any) -> str:
        try:
            return str(write(*words, opens=opens))
        except RefusedByTemplate as error:
            return f"refused: {error}"

    filled = outcome(MOULDS[name].write, [ASKED, said], new)
    assert filled == outcome(TEMPLATES[name].write, [ASKED, said, *new])


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_shape_is_rendered_twice_however_many_turns_have_it(name: str) -> None:
    template = template_of(SOURCES[name])
    moulds = Uncompared(template, looks_of(template.source), ())
    for number in range(50):
        id = f"c{number:08}"
        said = {"role": "assistant", "content": "", "tool_calls": [call("f", {"x": "y"}, id)]}
        content = f"state {number:02}"
        answer = {"role": "tool", "content": content, "name": "f", "tool_call_id": id}
        assert moulds.write([ASKED, said], [answer]).count(content) == 1
    # the template of llama writes an answer as JSON, where a probe looks otherwise
    assert template.count == (52 if name == "llama" else 2)


@pytest.mark.parametrize(
    "looks",
    [
        "{% if content[0] == '[' %}",
        "{% if content[:3] == 'abc' %}",
        "{% if content | length > 20 %}",
        "{% if content | int > 5 %}",
        "{% if content.isdigit() %}",
        "{% if content is upper %}",
        "{% if strftime_now('%H') == '12' %}",
    ],
)
def test_a_template_that_looks_for_more_than_constants_has_no_moulds(looks: str) -> None:
    source = CHATML + "{% set content = messages[0].content %}" + looks + "x{% endif %}"
    assert looks_of(CHATML) is not None
    assert looks_of(source) is None
    template = template_of(source)
    moulds = Moulds(template, None, ())
    for number in range(3):
        moulds.write([ASKED], [{"role": "user", "content": f"state {number}"}])
    assert template.count == 3


def test_a_mould_that_differs_from_its_template_is_told_and_used_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever was overlooked in a template's source: here it is another template's source."""
    template = template_of(CHATML + "{% if '7' in messages[1].content %}seven{% endif %}")
    moulds = Moulds(template, looks_of(CHATML), ())
    told = []
    for number in range(16):
        message = {"role": "user", "content": f"state {number:02}"}
        told.append(moulds.write([ASKED], [message]) == template.write([ASKED, message], ()))
    assert all(told)  # the eighth use, of state 07, is one that is compared
    assert "rendered each time from now on" in caplog.text
    count = template.count
    moulds.write([ASKED], [{"role": "user", "content": "state 99"}])
    assert template.count == count + 1


def test_a_template_that_cannot_be_read_has_no_moulds() -> None:
    assert looks_of("{% if %}") is None
