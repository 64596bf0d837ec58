"""Settings of ``nodes/join`` that cannot hold are told before anybody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_nodes.config import JoinConfig
from gcore_nodes.join_launcher import JoinLauncher, listening_address

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.factories import build
from gcore_core.kits.commands import load_plan
from gcore_core.kits.launching import machine_facts

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
