"""An environment of OpenEnv, in the host by its class and behind its own server."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ECHO = """
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    message: str = ""


class Echo(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return EchoObservation(message=f"Say yes to {seed}.", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        done = "yes" in action.message or self.count > 2
        reward = float("yes" in action.message)
        return EchoObservation(message=f"You said {action.message}.", done=done, reward=reward)

    @property
    def state(self):
        return State(episode_id="", step_count=self.count)
"""
SERVER = """
import sys, uvicorn
from openenv.core import create_app
from echo import Echo, EchoAction, EchoObservation

app = create_app(Echo, EchoAction, EchoObservation, mode="simulation")
uvicorn.run(app, fd=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    (tmp_path / "echo.py").write_text(ECHO, encoding="utf-8")
    return tmp_path


@pytest.fixture
def url(player: Any, echo: Path) -> Iterator[str]:
    """Gives the address of the environment's own server. It listens before the server begins."""
    (echo / "serve.py").write_text(SERVER, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.fileno()
        server = subprocess.Popen(
            [player.python, "serve.py", str(number)], cwd=echo, pass_fds=(number,)
        )
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.kill()
            server.wait()


def ways(player: Any, folder: Path, url: str, texts: list[str], **config: Any) -> list[list[Any]]:
    """Plays the same texts by the class and by the server; returns what each has told."""
    played = []
    of_class = {"cls": f"{folder}/echo.py:Echo", "action": f"{folder}/echo.py:EchoAction"}
    for place in (of_class, {"base_url": url}):
        left = iter([*({"text": text} for text in texts), None])
        seen = player.play(
            "openenv:OpenEnv", lambda _, left=left: next(left), seed=7, **place, **config
        )
        for one in seen:
            assert "error" not in one, one
        played.append(
            [
                (one["messages"][0]["content"], one["rewards"], one["done"], one["truncated"])
                for one in seen
            ]
        )
    return played


def test_a_class_and_its_server_play_the_same_episode(player: Any, echo: Path, url: str) -> None:
    by_class, by_server = ways(player, echo, url, ["no", "yes"], field="message", told="message")
    assert by_class == by_server
    assert by_class == [
        ("Say yes to 7.", {"openenv": 0.0}, False, False),
        ("You said no.", {"openenv": 0.0}, False, False),
        ("You said yes.", {"openenv": 1.0}, True, False),
    ]


def test_without_a_field_replies_and_observations_are_json(
    player: Any, echo: Path, url: str
) -> None:
    texts = ["no JSON", '{"other": 1}', '{"message": "yes"}']
    by_class, by_server = ways(player, echo, url, texts[:1] + texts[2:])
    assert by_class == by_server
    assert by_class[0][0] == '{"message": "Say yes to 7."}'
    assert by_class[1][0].startswith("This is no action:") and by_class[1][1] == {}
    assert by_class[2] == ('{"message": "You said yes."}', {"openenv": 1.0}, True, False)
