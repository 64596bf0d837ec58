"""``Tools``: what a class's methods are as tools, and that no call of one ends an episode."""

from __future__ import annotations

import ast
import asyncio
import random
import sys
import threading
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from gcore_environments import words
from gcore_environments.words import Observation, Reply, ToolCall, Tools

ROW = {"prompt": "3 + 4", "messages": [{"role": "user", "content": "3 + 4"}], "answer": "7"}


class Desk(Tools):
    tool_s = 5.0

    def __init__(self) -> None:
        self.held: list[int] = []
        self.met = asyncio.Barrier(2)
        self.never = threading.Event()

    def add(self, numbers: list[int], start: int = 0) -> int:
        """Adds numbers.

        Args:
            numbers: what is added,
                in any order
            start: what they are added to
        """
        return sum(numbers, start)

    def look(
        self,
        where: Literal["left", "right"],
        at: Optional[str] = None,  # noqa: UP045 - as many write it
        scale: float = 1.0,
        names: dict[str, bool] | None = None,
        anything: Any = None,
    ) -> dict[str, Any]:
        return {"where": where, "at": at, "scale": scale, "names": names, "anything": anything}

    async def meet(self) -> str:
        """Ends when another call of the same turn is in it, too."""
        await self.met.wait()
        return "met"

    def hold(self, number: int) -> str:
        self.held.append(number)
        return f"{self.held}"

    def fail(self) -> None:
        raise KeyError("no such thing")

    def leave(self) -> None:
        sys.exit(3)

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def block(self) -> None:
        self.never.wait()

    def give(self) -> object:
        return object()

    @staticmethod
    def fixed(text: str) -> str:
        return text.upper()

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    def _hidden(self) -> str:
        return "nobody calls this"

    def rewards(self, reply: Reply) -> dict[str, float]:
        return {"right": float(reply.text == self.row["answer"])}


def called(name: str, number: int = 0, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=f"call_{number}")


async def told(desk: Tools, *calls: ToolCall) -> list[str]:
    """What the policy is told of calls of one turn."""
    observation = await desk.step(Reply(text="", calls=list(calls)))
    assert not observation.done
    assert [one["tool_call_id"] for one in observation.messages] == [call.id for call in calls]
    return [one["content"] for one in observation.messages]


async def opened() -> Desk:
    desk = Desk()
    await desk.reset(ROW, 7)
    return desk


async def test_reset_shows_the_row_and_the_public_methods_in_their_order() -> None:
    observation = await Desk().reset(ROW, 7)
    assert observation.messages == ROW["messages"]
    names = [tool["function"]["name"] for tool in observation.tools]
    shown = ["add", "look", "meet", "hold", "fail", "leave", "wait", "block", "give"]
    assert names == [*shown, "fixed", "kind"]


async def test_a_row_without_messages_is_its_prompt() -> None:
    observation = await Desk().reset({"prompt": "hi"}, 0)
    assert observation.messages == [{"role": "user", "content": "hi"}]


def test_a_schema_has_the_types_the_defaults_and_what_the_docstring_says() -> None:
    add, look = Desk._schemas[:2]
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "numbers": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "description": "what is added, in any order",
                    },
                    "start": {
                        "type": "integer",
                        "description": "what they are added to",
                        "default": 0,
                    },
                },
                "required": ["numbers"],
            },
        },
    }
    assert look["function"]["parameters"]["properties"] == {
        "where": {"enum": ["left", "right"]},
        "at": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "scale": {"type": "number", "default": 1.0},
        "names": {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "boolean"}},
                {"type": "null"},
            ],
            "default": None,
        },
        "anything": {"default": None},
    }


def untyped(self: Any, number) -> int:  # type: ignore[no-untyped-def]
    return 0


def strange(self: Any, number: complex) -> int:
    return 0


def spread(self: Any, *numbers: int) -> int:
    return 0


def unreadable(self: Any, number: NoSuchType) -> int:  # type: ignore[name-defined]  # noqa: F821
    return 0


@pytest.mark.parametrize(
    ("method", "part"),
    [
        (untyped, "Bad.tool: argument number has no type"),
        (strange, "Bad.tool: argument number: complex is not a type that a tool can take"),
        (spread, "Bad.tool: *numbers"),
        (unreadable, "Bad.tool: a type cannot be read: name 'NoSuchType'"),
    ],
)
def test_a_method_that_can_be_no_tool_is_an_error_of_its_class(method: Any, part: str) -> None:
    with pytest.raises(TypeError) as caught:
        type("Bad", (Tools,), {"tool": method})
    assert part in str(caught.value)


def test_a_method_may_not_take_a_name_that_tools_uses() -> None:
    with pytest.raises(TypeError, match="Bad.random is a name"):
        type("Bad", (Tools,), {"random": lambda self: 0})


async def test_calls_are_answered_in_their_order() -> None:
    desk = await opened()
    said = await told(desk, called("add", 0, numbers=[3, 4]), called("fixed", 1, text="a"))
    assert said == ["7", "A"]
    assert await told(desk, called("kind"), called("add", numbers=[1], start=2.0)) == ["Desk", "3"]
    look = called("look", where="left", scale=2, names={"a": True}, anything=[1])
    assert await told(desk, look) == [
        '{"where": "left", "at": null, "scale": 2.0, "names": {"a": true}, "anything": [1]}'
    ]


async def test_asynchronous_calls_of_a_turn_run_at_the_same_time() -> None:
    assert await told(await opened(), called("meet"), called("meet")) == ["met", "met"]


async def test_other_calls_of_a_turn_run_one_after_the_other() -> None:
    said = await told(await opened(), *(called("hold", i, number=i) for i in range(20)))
    assert said == [str(list(range(i + 1))) for i in range(20)]


async def test_what_a_tool_raises_is_an_observation() -> None:
    said = await told(await opened(), called("fail"), called("leave"), called("give"))
    assert said[:2] == ["error: KeyError: 'no such thing'", "error: RuntimeError: SystemExit(3)"]
    assert said[2].startswith("error: what give returned is neither text nor JSON")


async def test_a_tool_that_does_not_end_is_an_observation_and_holds_nobody() -> None:
    desk = await opened()
    desk.tool_s = 0.05
    said = await told(desk, called("wait"), called("block"), called("kind"))
    desk.never.set()
    assert said == [
        "error: wait did not end within 0.05 s",
        "error: block did not end within 0.05 s",
        "Desk",
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall(name="add", arguments=None), "the arguments of add are not a JSON object"),
        (called("sub"), "there is no tool 'sub'. Tools: add, look,"),
        (called("_hidden"), "there is no tool '_hidden'"),
        (called("rewards", reply=""), "there is no tool 'rewards'"),
        (called("add"), "add: argument numbers is missing"),
        (called("add", numbers=[], to=1), "there is no argument to (there are: numbers, start)"),
        (called("add", numbers="1"), 'argument numbers is "1", which does not fit {"type": "arr'),
        (called("add", numbers=[1, True]), "argument numbers[1] is true, which does not fit"),
        (called("add", numbers=[1.5]), "argument numbers[0] is 1.5, which does not fit"),
        (called("add", numbers=[float("inf")]), "numbers[0] is Infinity, which does not fit"),
        (called("look", where="up"), 'argument where is "up", which does not fit {"enum":'),
        (called("look", where="left", at=3), "argument at is 3, which does not fit"),
        (called("look", where="left", names={"a": 1}), 'argument names is {"a": 1}, which'),
        (called("look", scale="2"), 'where is missing; argument scale is "2", which does not fit'),
    ],
)
async def test_a_wrong_call_is_an_observation_that_says_what_is_wrong(
    call: ToolCall, said: str
) -> None:
    (text,) = await told(await opened(), call)
    assert text.startswith("error: ")
    assert said in text


async def test_a_reply_without_calls_ends_the_episode_with_its_rewards() -> None:
    desk = await opened()
    right = Observation(rewards={"right": 1.0}, done=True)
    assert await desk.step(Reply(text="7")) == right


async def test_rewards_may_be_asynchronous() -> None:
    class Slow(Tools):
        async def rewards(self, reply: Reply) -> dict[str, float]:  # type: ignore[override]
            await asyncio.sleep(0)
            return {"length": float(len(reply.text))}

    assert (await Slow().step(Reply(text="abc"))).rewards == {"length": 3.0}


async def test_an_episode_has_random_numbers_of_its_own() -> None:
    one, other, third = Desk(), Desk(), Desk()
    for desk, seed in ((one, 1), (other, 1), (third, 2)):
        await desk.reset(ROW, seed)
    random.random()
    assert one.random.random() == other.random.random() != third.random.random()


def test_a_function_has_a_schema_too() -> None:
    def find(text: str) -> str:
        """Finds a text."""
        return text

    assert words.schema_of(find)["function"]["description"] == "Finds a text."
    with pytest.raises(TypeError, match="argument text has no type"):
        words.schema_of(lambda text: text)


def test_the_words_need_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(words.__file__).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported <= set(sys.stdlib_module_names)
