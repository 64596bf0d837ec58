"""Settings of ``nodes/join`` that cannot hold are told before anybody waits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from gcore_nodes import join_launcher
from gcore_nodes.channel import Over
from gcore_nodes.config import JoinConfig
from gcore_nodes.facts import machine_facts
from gcore_nodes.join_launcher import JoinLauncher, listening_address

from gcore_core.contract.errors import ConfigError, WorkerError
from gcore_core.contract.factories import build
from gcore_core.kits.commands import load_plan

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": 0}, "hosts must be at least 1"),
        ({"hosts": ["a", "a"]}, "named 2 times"),
        ({"join_port": 80}, "join_port must be from 1024"),
        ({"wait_s": 0.0}, "wait_s must be positive"),
        ({"min_hosts": 0}, "min_hosts must be at least 1"),
        ({"min_hosts": 2}, "min_hosts is 2, and hosts is 1"),
        ({"hosts": ["a"], "min_hosts": 2}, "min_hosts is 2, and hosts is ['a']"),
        ({"port": 80}, "port must be from 1024"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        JoinConfig(**{"hosts": 1, **settings})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "hosts"), [("2", 2), ("slurm", "slurm"), ("[a,b]", ["a", "b"]), ("my/file", "my/file")]
)
def test_hosts_are_a_number_names_or_where_they_stand(text: str, hosts: Any) -> None:
    plan = load_plan(RECIPE, ["launcher.use=nodes/join", f"launcher.config.hosts={text}"])
    launcher = build(plan.factory("launcher"))
    assert isinstance(launcher, JoinLauncher) and launcher._join.hosts == hosts


@pytest.mark.parametrize(
    ("addresses", "settings", "expected"),
    [
        (["10.0.0.5"], {}, "10.0.0.5"),
        ([], {}, "127.0.0.1"),
        (["10.0.0.5", "192.168.1.5"], {"address": "192.168.0.0/16"}, "192.168.1.5"),
        (["10.0.0.5", "192.168.1.5"], {"home": "10.0.0.5"}, "10.0.0.5"),
        (["10.0.0.5", "192.168.1.5"], {}, None),
        (["10.0.0.5"], {"address": "192.168.0.0/16"}, None),
    ],
)
def test_nodes_join_at_one_address(
    addresses: list[str], settings: dict[str, Any], expected: str | None
) -> None:
    facts = msgspec.structs.replace(machine_facts(), host="no.such.name", addresses=addresses)
    config = JoinConfig(hosts=1, **settings)
    if expected is not None:
        assert listening_address(config, facts) == expected
        return
    with pytest.raises(ConfigError) as error:
        listening_address(config, facts)
    assert error.value.where == "launcher.config.home"
    assert error.value.why == f"it has {', '.join(addresses)}"


@pytest.mark.parametrize("min_hosts", [None, 1])
async def test_a_counted_node_that_does_not_come_again_is_a_lost_machine(
    min_hosts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that can do with fewer is placed anew; for any other its nodes are not those named."""

    class OneNode:
        """A door to which one node comes, and later nobody."""

        asked: ClassVar[int] = 0

        def __init__(self, *arguments: Any, **settings: Any) -> None: ...

        async def open(self) -> None: ...

        async def close(self, over: Over) -> None: ...

        async def gather(self, wait_s: float, least: int | None) -> list[Any]:
            OneNode.asked += 1
            if OneNode.asked > 1:
                raise ConfigError("not all nodes have joined within 1 s", why="missing: one")
            return [SimpleNamespace(name="one")]

    def hosts_of(joined: Any, *_: Any, **__: Any) -> list[Any]:
        return [SimpleNamespace(name=node.name) for node in joined]

    monkeypatch.setattr(join_launcher, "Door", OneNode)
    monkeypatch.setattr(join_launcher, "read_token", lambda *_: b"token")
    monkeypatch.setattr(join_launcher, "_hosts", hosts_of)
    monkeypatch.setattr(JoinLauncher, "node_facts", lambda *_, **__: [])
    launcher = JoinLauncher(JoinConfig(hosts=2, home="127.0.0.1", min_hosts=min_hosts))
    await launcher.find_nodes(1, again=True)
    launcher._opens_site = True
    with pytest.raises(ConfigError if min_hosts is None else WorkerError, match="missing: one"):
        async with launcher.hosts():
            pass
