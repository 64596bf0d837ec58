"""Environments of aviary: its DummyEnv, and one that is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Ends by ``done`` at the word "end", and by ``truncated`` after two calls.
CUT = '''
from aviary.core import Environment, Message, Tool, ToolRequestMessage


class Cut(Environment[dict]):
    def __init__(self, limit: int = 2):
        self.limit = limit

    async def reset(self):
        def say(word: str) -> str:
            """Says a word.

            Args:
                word: What is said.
            """
            return f"said {word}"

        self.state = {"calls": 0}
        self.tools = [Tool.from_function(say)]
        messages = [Message(role="system", content="Be brief."), Message(content="Say end.")]
        return messages, self.tools

    async def step(self, action):
        said = await self.exec_tool_calls(action)
        self.state["calls"] += len(said)
        words = [call.function.arguments.get("word") for call in action.tool_calls]
        return said, float(len(said)), "end" in words, self.state["calls"] >= self.limit
'''


def test_the_dummy_is_solved_by_its_tool(player: Any, call: Any) -> None:
    seen = player.play(
        "aviary:Aviary",
        lambda _: {"text": "Here.", "calls": [call("print_story", story="five words are a story")]},
        row={"task": "cats"},
        cls="aviary.core:DummyEnv",
    )
    first = seen[0]
    assert first["messages"] == [
        {"role": "user", "content": "Write a 5 word story via print_story about cats"}
    ]
    tools = {tool["function"]["name"]: tool for tool in first["tools"]}
    assert set(tools) == {"print_story", "cast_float", "cast_int", "get_random_int"}
    assert tools["print_story"]["function"]["parameters"]["required"] == ["story"]
    assert seen[-1]["done"] and seen[-1]["rewards"] == {"aviary": 1.0}


def test_an_answer_without_a_call_is_told_so_and_its_tools_answer(player: Any, call: Any) -> None:
    answers = iter(
        [{"text": "hello"}, {"text": "", "calls": [call("cast_int", x=2.7)]}, None],
    )
    seen = player.play("aviary:Aviary", lambda _: next(answers), cls="dummy")
    assert seen[1]["messages"] == [{"role": "user", "content": "Call one of the tools."}]
    assert seen[2]["messages"] == [
        {"role": "tool", "content": "2", "tool_call_id": "call_cast_int", "name": "cast_int"}
    ]


def test_truncated_is_kept_apart_from_done(player: Any, call: Any, tmp_path: Path) -> None:
    (tmp_path / "cut.py").write_text(CUT, encoding="utf-8")
    for word, limit, done, truncated, turns in [
        ("more", 2, False, True, 2),
        ("end", 2, True, False, 1),
        ("end", 1, True, False, 1),
    ]:
        seen = player.play(
            "aviary:Aviary",
            lambda _, word=word: {"text": "", "calls": [call("say", word=word)]},
            cls=f"{tmp_path}/cut.py:Cut",
            options={"limit": limit},
        )
        assert (seen[-1]["done"], seen[-1]["truncated"]) == (done, truncated)
        assert len(seen) - 1 == turns and seen[-1]["rewards"] == {"aviary": 1.0}
        assert [m["role"] for m in seen[0]["messages"]] == ["system", "user"]
