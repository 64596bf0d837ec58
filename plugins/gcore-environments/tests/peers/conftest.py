"""Plays in environments of other packages, each in an interpreter of its own.

G_CORE_PEERS names a folder with a virtual environment for each:

    cd $G_CORE_PEERS
    for peer in gymnasium textarena reasoning aviary mcp openenv verifiers renderers openai swe
    do python -m venv $peer; done
    gymnasium/bin/pip install "gymnasium<1.3" minigrid
    textarena/bin/pip install textarena==0.7.4
    reasoning/bin/pip install reasoning-gym==0.1.25
    aviary/bin/pip install fhaviary==0.37.0
    mcp/bin/pip install mcp==2.3.0 fastmcp==4.2.3
    openenv/bin/pip install openenv==0.10.0
    verifiers/bin/pip install verifiers==0.4.0 renderers==0.1.12
    renderers/bin/pip install renderers==0.1.12 transformers
    openai/bin/pip install openai==2.54.0
    swe/bin/pip install mini-swe-agent==2.4.6

A folder verl has a file of verl's own tests: test_verl.py says which.
Nothing of G-Core is in them. Without the variable these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_environments.hosts import Hosts, HostSettings

#: Longest that a package may take to be imported, or for one turn.
PATIENCE_S = 120.0

Message = dict[str, Any]
#: What a policy answers to an observation: the fields of Reply; None: it plays no more.
Policy = Callable[[Message], Message | None]


class Player:
    """Plays episodes in one interpreter.

    python: the interpreter.
    """

    def __init__(self, python: Path, directory: str) -> None:
        self.python = python
        self._directory = directory
        self._open: list[Hosts] = []

    def play(
        self,
        adapter: str,
        policy: Policy,
        *,
        row: Message | None = None,
        seed: int = 0,
        **config: Any,
    ) -> list[Message]:
        """Plays an episode of "module:Class"; returns its observations."""
        hosts = self.hosts(adapter, **config)
        key = [0, seed]
        host = hosts.of((0, seed))
        host.send(op="open", id=key, seed=seed, row=row or {}, endpoint={})
        seen = [self.next(hosts)]
        while "error" not in seen[-1] and not seen[-1]["done"] and not seen[-1]["truncated"]:
            reply = policy(seen[-1])
            if reply is None:
                break
            host.send(op="step", id=key, turn=len(seen), **{"status": "finished", **reply})
            seen.append(self.next(hosts))
        host.send(op="close", id=key)
        return seen

    def hosts(self, adapter: str, **config: Any) -> Hosts:
        settings = HostSettings(
            environment=f"gcore_environments.adapters.{adapter}",
            config=config,
            python=str(self.python),
            directory=self._directory,
        )
        self._open.append(Hosts(settings))
        return self._open[-1]

    def next(self, hosts: Hosts) -> Message:
        """Returns the next message that is not of a host's start. Fails for a lost one."""
        while "ready" in (message := hosts.replies.get(timeout=PATIENCE_S)[1]):
            pass
        assert "lost" not in message, message
        return message

    def plain(self, code: str, *words: Any) -> Any:
        """Runs code in the interpreter, with ``words`` as JSON; returns the JSON that it prints."""
        ended = subprocess.run(
            [self.python, "-c", code, json.dumps(words)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    def close(self) -> None:
        for hosts in self._open:
            hosts.close()


@pytest.fixture
def player(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Player]:
    """Gives a player in the interpreter that is named as the test's module: test_NAME.py."""
    folder = os.environ.get("G_CORE_PEERS")
    if not folder:
        pytest.skip("G_CORE_PEERS names no folder of interpreters")
    name = Path(request.node.fspath).stem.removeprefix("test_peer_")
    python = Path(folder).absolute() / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"G_CORE_PEERS has no interpreter {name}")
    player = Player(python, str(tmp_path))
    yield player
    player.close()


@pytest.fixture
def call() -> Callable[..., Message]:
    """Gives a maker of tool calls, as a host gets them."""

    def made(name: str, **arguments: Any) -> Message:
        return {"name": name, "arguments": arguments, "text": "", "id": f"call_{name}"}

    return made
