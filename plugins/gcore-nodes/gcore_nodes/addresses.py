"""Finds out where the processes of a run are to be reached: one address a host, one port each."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.launching import check_ports
from gcore_nodes.facts import MachineFacts


@dataclass(frozen=True)
class Addresses:
    """Holds the addresses of a run.

    views: node -> (process -> its address, as seen from the node).
    public: process -> its address for other nodes; empty where there is one node.
    bulk: node -> where its agent serves content to the others; empty where there is one node.
    meeting: role -> "HOST:PORT" where its ranks meet in plain, for roles whose workers are on
        several nodes, if all nodes are in private networks. Of other processes with numbers, such
        as controllers, what is in front of the number counts as a role.
    """

    views: dict[str, dict[str, str]]
    public: dict[str, str]
    bulk: dict[str, str]
    meeting: dict[str, str]


def own_address(host: str, facts: MachineFacts, network: str | None) -> str:
    """Returns the address by which other hosts reach a host.

    host: its name, as the job has it; a user before an @ does not count.
    network: the network that the address must lie in; None: it is what the name stands for.
    Raises ConfigError when none of the host's addresses will do.
    """
    candidates = _named(host.rpartition("@")[2])
    if network is not None:
        inside = [a for a in facts.addresses if lies_in(a, [network])]
        for address in [a for a in candidates if a in inside] or inside:
            return address
        raise _no_address(host, facts, f"none of them lies in {network}")
    for address in candidates:
        if address in facts.addresses:
            return address
    if len(facts.addresses) == 1:
        return facts.addresses[0]
    raise _no_address(host, facts, "its name stands for none of them")


def _named(host: str) -> list[str]:
    """Returns the addresses that a name stands for here; [] where nobody knows."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


def _no_address(host: str, facts: MachineFacts, why: str) -> ConfigError:
    listed = ", ".join(facts.addresses) or "none"
    return ConfigError(
        f"it is not clear by which address others reach {host}",
        where="launcher.config.address",
        why=f"the host has {listed}; {why}",
        todo="set it to the network that joins the hosts, such as 10.0.0.0/16",
    )


def address_towards(other: str, port: int) -> str:
    """Returns the address of this machine from which it reaches ``other``. Nothing is sent.

    Raises ConfigError when there is no way there.
    """
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, port))
        except OSError as error:
            raise ConfigError(
                f"this machine has no way to {other}: {error.strerror}",
                where="launcher.config.address",
                todo="set it to the network that joins the hosts, such as 10.0.0.0/16",
            ) from error
        return str(probe.getsockname()[0])


def assign(
    nodes: Mapping[str, tuple[str, str]],
    where: Mapping[str, str],
    port: int,
    private: Sequence[str] = (),
) -> Addresses:
    """Gives every process its addresses.

    A process has a unix socket for those of its own node and a port for others. The ports of each
    node are a row: its agent's, the one of the agent's content, those of its processes, then those
    where ranks meet that are on several nodes.

    nodes: node -> (its address, its directory of sockets).
    where: process -> its node, for all processes, the supervisor too, without agents.
    port: the first of each node's row.
    private: networks in which ranks of one role may meet that are on several nodes.
    Raises ConfigError when there are not so many ports.
    """
    local = {name: f"unix:{directory}/{name}" for name, (_, directory) in nodes.items()}
    local |= {name: f"unix:{nodes[node][1]}/{name}" for name, node in where.items()}
    if len(nodes) == 1:
        return Addresses(dict.fromkeys(nodes, local), {}, {}, {})
    is_private = all(lies_in(address, private) for address, _ in nodes.values())
    public = {}
    bulk = {}
    following = {}
    for name, (address, _) in nodes.items():
        public[name] = _tls(address, port)
        bulk[name] = _tls(address, port + 1)
        following[name] = port + 2
    for name, node in where.items():
        public[name] = _tls(nodes[node][0], following[node])
        following[node] += 1
    meeting = {}
    for role, first in _parted(where).items() if is_private else ():
        meeting[role] = _endpoint(nodes[first][0], following[first])
        following[first] += 1
    check_ports(port, max(following.values()) - 1)
    homes = dict(where) | {name: name for name in nodes}
    views = {
        node: {name: local[name] if homes[name] == node else public[name] for name in homes}
        for node in nodes
    }
    return Addresses(views, public, bulk, meeting)


def _parted(where: Mapping[str, str]) -> dict[str, str]:
    """Returns role -> its first worker's node, for roles whose workers are on several nodes."""
    nodes_of: dict[str, list[str]] = {}
    for name, node in where.items():
        nodes_of.setdefault(name.rpartition(".")[0], []).append(node)
    return {role: nodes[0] for role, nodes in nodes_of.items() if role and len(set(nodes)) > 1}


def _tls(address: str, port: int) -> str:
    return f"tls:{_endpoint(address, port)}"


def _endpoint(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{port}"


def lies_in(address: str, networks: Sequence[str]) -> bool:
    """Whether an address lies in one of the networks."""
    parsed = ipaddress.ip_address(address)
    return any(parsed in ipaddress.ip_network(network, strict=False) for network in networks)
