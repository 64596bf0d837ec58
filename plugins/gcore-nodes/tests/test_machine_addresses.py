"""Every process has one address on its own node and another one for the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_nodes import addresses as module
from gcore_nodes.addresses import assign, own_address
from gcore_nodes.agent import split_patience
from gcore_nodes.facts import MachineFacts, machine_facts
from gcore_nodes.machines_config import MachinesConfig

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.launching import LocalConfig
from gcore_core.node.launchers import LocalLauncher

NODES = {"agent.0": ("10.0.0.1", "/tmp/a"), "agent.1": ("10.0.0.2", "/tmp/b")}
WHERE = {"supervisor": "agent.0", "rollout.0": "agent.1", "rollout.1": "agent.1"}


def facts(*addresses: str) -> MachineFacts:
    return msgspec.structs.replace(machine_facts(), addresses=list(addresses))


def test_addresses_of_two_nodes() -> None:
    found = assign(NODES, WHERE, 5000)
    assert found.public == {
        "agent.0": "tls:10.0.0.1:5000",
        "supervisor": "tls:10.0.0.1:5002",
        "agent.1": "tls:10.0.0.2:5000",
        "rollout.0": "tls:10.0.0.2:5002",
        "rollout.1": "tls:10.0.0.2:5003",
    }
    assert found.bulk == {"agent.0": "tls:10.0.0.1:5001", "agent.1": "tls:10.0.0.2:5001"}
    here, there = found.views["agent.0"], found.views["agent.1"]
    assert here.keys() == there.keys() == found.public.keys()
    assert here["supervisor"] == "unix:/tmp/a/supervisor"
    assert here["rollout.0"] == "tls:10.0.0.2:5002"
    assert there["rollout.0"] == "unix:/tmp/b/rollout.0"
    assert there["agent.0"] == "tls:10.0.0.1:5000"


def test_one_node_needs_no_network() -> None:
    found = assign({"agent.0": NODES["agent.0"]}, {"supervisor": "agent.0"}, 5000)
    assert (found.public, found.bulk) == ({}, {})
    assert found.views == {
        "agent.0": {"agent.0": "unix:/tmp/a/agent.0", "supervisor": "unix:/tmp/a/supervisor"}
    }


def test_between_nodes_everything_goes_over_tls() -> None:
    found = assign(NODES, WHERE, 5000, ["10.0.0.0/24"])
    addresses = [*found.bulk.values(), *found.public.values()]
    assert all(address.startswith("tls:") for address in addresses)


def test_ranks_on_several_nodes_of_a_private_network_get_a_place_to_meet() -> None:
    """Behind the ports of the first rank's node; on another network, and on one node, none."""
    where = {"policy.0": "agent.1", "policy.1": "agent.0", "rollout.0": "agent.1"}
    assert assign(NODES, where, 5000, ["10.0.0.0/24"]).meeting == {"policy": "10.0.0.2:5004"}
    for private in ([], ["10.0.0.1/32"], ["::/0"]):
        assert assign(NODES, where, 5000, private).meeting == {}


def test_ports_that_run_out() -> None:
    assign(NODES, WHERE, 65532)
    with pytest.raises(ConfigError, match="65533 to 65536") as error:
        assign(NODES, WHERE, 65533)
    assert error.value.todo == "set it to at most 65532"


def test_ports_of_one_machine_that_run_out(tmp_path: Path) -> None:
    launcher = LocalLauncher(LocalConfig(port=65000))
    names = [f"rollout.{n}" for n in range(536)]
    assert launcher._addresses(names, tmp_path)["rollout.535"] == "tcp:127.0.0.1:65535"
    with pytest.raises(ConfigError, match="needs the ports 65000 to 65536") as error:
        launcher._addresses([*names, "rollout.536"], tmp_path)
    assert error.value.where == "launcher.config.port"
    assert error.value.todo == "set it to at most 64999"


@pytest.mark.parametrize("patience_s", [math.inf, 1e6])
def test_a_patience_that_the_kernel_cannot_count_is_refused(patience_s: float) -> None:
    with pytest.raises(ValueError, match="patience_s must be at most 86400, a day"):
        MachinesConfig(patience_s=patience_s)
    assert split_patience(MachinesConfig(patience_s=86400.0).patience_s)[0] == 43200.0


def test_addresses_of_ipv6_stand_in_brackets() -> None:
    nodes = {"agent.0": ("fd00::1", "/tmp/a"), "agent.1": ("fd00::2", "/tmp/b")}
    assert assign(nodes, {}, 5000).public["agent.1"] == "tls:[fd00::2]:5000"


@pytest.mark.parametrize(
    ("host", "network", "expected"),
    [
        ("10.0.0.5", None, "10.0.0.5"),
        ("me@10.0.0.5", None, "10.0.0.5"),
        ("node", None, "192.168.0.5"),  # what its name stands for
        ("node", "10.0.0.0/8", "10.0.0.5"),
        ("10.0.0.5", "192.168.0.0/16", "192.168.0.5"),
    ],
)
def test_the_address_of_a_host(
    monkeypatch: pytest.MonkeyPatch, host: str, network: str | None, expected: str
) -> None:
    def named(name: str) -> list[str]:
        return ["192.168.0.5"] if name == "node" else [name]

    monkeypatch.setattr(module, "_named", named)
    assert own_address(host, facts("10.0.0.5", "192.168.0.5"), network) == expected


def test_a_host_with_one_address_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_named", lambda name: [])
    assert own_address("pod-1", facts("10.0.0.5"), None) == "10.0.0.5"


@pytest.mark.parametrize(
    ("network", "why"),
    [(None, "its name stands for none of them"), ("10.9.0.0/16", "none of them lies in 10.9")],
)
def test_a_host_whose_address_is_not_clear(
    monkeypatch: pytest.MonkeyPatch, network: Any, why: str
) -> None:
    monkeypatch.setattr(module, "_named", lambda name: ["127.0.1.1"])
    with pytest.raises(ConfigError, match="by which address") as error:
        own_address("node", facts("10.0.0.5", "192.168.0.5"), network)
    assert why in error.value.why
    assert "10.0.0.5, 192.168.0.5" in error.value.why


@pytest.mark.parametrize("config", [LocalConfig, MachinesConfig])
@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"port": 70000}, "port must be from 1024 to 65000"),
        ({"port": 0}, "port must be from 1024 to 65000"),
        ({"store_gib": math.inf}, "store_gib must be a positive number"),
        ({"spill_after_s": math.nan}, "spill_after_s must be a number from 0 on"),
        ({"spill_after_s": -1.0}, "spill_after_s must be a number from 0 on"),
    ],
)
def test_settings_of_launchers_that_no_run_can_use_are_refused(
    config: Any, settings: dict[str, Any], refused: str
) -> None:
    """By ``g-core check`` already: each ended a run with a traceback, or had generators wait."""
    with pytest.raises(ValueError, match=refused):
        config(**settings)
    config(port=29400, store_gib=0.5, spill_after_s=0.0)
