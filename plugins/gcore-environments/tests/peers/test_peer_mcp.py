"""Tools of MCP servers: two at once, one that dies in a call, one that does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SERVER = '''
import os, time
from fastmcp import FastMCP

server = FastMCP("{name}")


@server.tool()
def {name}(a: int, b: int) -> int:
    """Computes with two numbers."""
    if a == 666:
        os._exit(3)
    if a == 777:
        time.sleep(600)
    if a == 888:
        raise ValueError("no such number")
    return a {sign} b


server.run(show_banner=False)
'''
ROW = {"messages": [{"role": "user", "content": "What is 3 + 4, and 3 * 4?"}]}


def commands(player: Any, folder: Path, *servers: tuple[str, str]) -> list[list[str]]:
    made = []
    for name, sign in servers:
        path = folder / f"{name}.py"
        path.write_text(SERVER.format(name=name, sign=sign), encoding="utf-8")
        made.append([str(player.python), path.name])
    return made


def test_two_servers_answer_calls_of_one_turn(player: Any, call: Any, tmp_path: Path) -> None:
    calls = [call("add", a=3, b=4), call("multiply", a=3, b=4)]
    answers = iter([{"text": "", "calls": calls}, {"text": "7 and 12"}])
    seen = player.play(
        "mcp:Mcp",
        lambda _: next(answers),
        row=ROW,
        path=str(tmp_path),
        commands=commands(player, tmp_path, ("add", "+"), ("multiply", "*")),
    )
    assert seen[0]["messages"] == ROW["messages"]
    tools = {tool["function"]["name"]: tool["function"] for tool in seen[0]["tools"]}
    assert set(tools) == {"add", "multiply"}
    assert tools["add"]["description"] == "Computes with two numbers."
    assert set(tools["add"]["parameters"]["properties"]) == {"a", "b"}
    assert [m["content"] for m in seen[1]["messages"]] == ["7", "12"]
    assert [m["tool_call_id"] for m in seen[1]["messages"]] == ["call_add", "call_multiply"]
    assert seen[2]["done"] and seen[2]["rewards"] == {}


def test_a_server_that_dies_in_a_call_is_told_and_the_other_goes_on(
    player: Any, call: Any, tmp_path: Path
) -> None:
    turns = [
        [call("add", a=666, b=0), call("multiply", a=2, b=5)],
        [call("add", a=1, b=1)],
        [call("multiply", a=3, b=5)],
    ]
    answers = iter([*({"text": "", "calls": calls} for calls in turns), {"text": "15"}])
    seen = player.play(
        "mcp:Mcp",
        lambda _: next(answers),
        row=ROW,
        path=str(tmp_path),
        commands=commands(player, tmp_path, ("add", "+"), ("multiply", "*")),
    )
    told = [[m["content"] for m in one["messages"]] for one in seen[1:]]
    dead = "error: the server of add has ended"
    assert told == [[dead, "10"], [dead], ["15"], []]
    assert seen[-1]["done"]


def test_what_a_tool_raises_or_does_not_end_is_told(player: Any, call: Any, tmp_path: Path) -> None:
    turns = [
        [call("add", a=888, b=0), call("subtract", a=1), call("add", a="x")],
        [call("add", a=777, b=0)],
    ]
    answers = iter([*({"text": "", "calls": calls} for calls in turns), None])
    seen = player.play(
        "mcp:Mcp",
        lambda _: next(answers),
        row=ROW,
        path=str(tmp_path),
        commands=commands(player, tmp_path, ("add", "+")),
        tool_s=15.0,
    )
    raised, unknown, wrong = (m["content"] for m in seen[1]["messages"])
    assert "no such number" in raised
    assert unknown == "error: there is no tool 'subtract'. Tools: add"
    assert "a" in wrong and "int" in wrong
    assert [m["content"] for m in seen[2]["messages"]] == ["error: add did not end within 15 s"]


def test_two_servers_with_one_tool_are_refused(player: Any, tmp_path: Path) -> None:
    once = commands(player, tmp_path, ("add", "+"))
    seen = player.play("mcp:Mcp", lambda _: None, row=ROW, path=str(tmp_path), commands=once * 2)
    assert "two servers have a tool add" in seen[-1]["error"]
