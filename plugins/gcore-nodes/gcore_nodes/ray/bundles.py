"""Decides what is asked of Ray: one bundle a node; and says what is missing while Ray has it not.

    nodes   resources    bundles
    -       -            one for each node with GPUs, or else for each node, with all that it has
    2       -            two, each with what the smaller of the two largest nodes has
    -       {GPU: 8}     one for each node that has so much in all
    2       {GPU: 8}     two of these, also while there are fewer nodes

Nothing here imports Ray.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

#: Every Ray node has 1 of the resource ``node:ADDRESS``; a little of it asks for just this node.
_PIN = 0.001
_COUNTED = ("CPU", "GPU")


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node of the cluster that is alive.

    total, free: amounts of its resources.
    """

    address: str
    total: dict[str, float]
    free: dict[str, float]


Bundle = dict[str, float]


def bundles(
    nodes: Sequence[RayNode], count: int | None, resources: Bundle
) -> tuple[list[Bundle], str]:
    """Returns one bundle for each node that the run is to have, or why there can be none yet.

    nodes: those that are alive.
    count, resources: ``RayConfig.nodes`` and ``RayConfig.resources``.
    """
    if not resources and any(node.total.get("GPU") for node in nodes):
        nodes = [node for node in nodes if node.total.get("GPU")]
    if resources:
        fitting = [node for node in nodes if _fits(resources, node.total)]
        asked = count or len(fitting)
        made = [dict(resources)] * asked
    elif count:
        largest = sorted(nodes, key=_size, reverse=True)[:count]
        asked = count if largest else 0
        made = [_common(largest)] * asked
    else:
        asked = len(nodes)
        made = [pinned(node) for node in nodes]
    if not asked:
        return [], f"none of {_number(len(nodes), 'node')} of the cluster has what is asked for"
    return made, ""


def pinned(node: RayNode, resources: Bundle | None = None) -> Bundle:
    """Returns a bundle that fits one node alone. resources: empty: all that it has."""
    whole = {name: node.total[name] for name in _COUNTED if node.total.get(name)}
    return (dict(resources or {}) or whole) | {f"node:{node.address}": _PIN}


def free_now(made: Sequence[Bundle], nodes: Sequence[RayNode]) -> list[Bundle]:
    """Returns bundles for those nodes that can take one of ``made`` now, each pinned to its node.

    At most as many as ``made``, on the nodes with the lowest addresses.
    """
    able = []
    for index in in_order([node.address for node in nodes]):
        node = nodes[index]
        fitting = [bundle for bundle in made if _fits(bundle, node.free)]
        if fitting:
            able.append(pinned(node, _without_pin(fitting[0])))
    return able[: len(made)]


def addresses_of(made: Sequence[Bundle]) -> list[str]:
    """Returns the nodes that bundles are pinned to."""
    names = [name for bundle in made for name in bundle if name.startswith("node:")]
    return [name.removeprefix("node:") for name in names]


def _size(node: RayNode) -> tuple[float, float]:
    return node.total.get("GPU", 0.0), node.total.get("CPU", 0.0)


def _common(nodes: Sequence[RayNode]) -> Bundle:
    """Returns what each of the nodes has."""
    common = {name: min(node.total.get(name, 0.0) for node in nodes) for name in _COUNTED}
    return {name: amount for name, amount in common.items() if amount} or {"CPU": 1.0}


def _fits(bundle: Bundle, amounts: dict[str, float]) -> bool:
    return all(amounts.get(name, 0.0) >= amount for name, amount in bundle.items())


def in_order(addresses: Sequence[str]) -> list[int]:
    """Returns the indices of addresses, lowest address first."""
    return sorted(
        range(len(addresses)), key=lambda i: (ipaddress.ip_address(addresses[i]).packed, i)
    )


# -- what is missing -------------------------------------------------------------------------------


def shortage(made: Sequence[Bundle], nodes: Sequence[RayNode]) -> str:
    """Says what is missing for bundles, for a person.

    The nodes that cannot take a bundle come with what they lack, at most four of them.
    """
    wanted = _without_pin(made[0])
    able = [node for node in nodes if any(_fits(bundle, node.free) for bundle in made)]
    head = f"{_number(len(made), 'node')} with {_amounts(wanted)} free are asked for"
    if len({_amounts(_without_pin(bundle)) for bundle in made}) > 1:
        head = f"{_number(len(made), 'node')} of {len(nodes)} are asked for, each whole"
    lines = [f"{head}; Ray has {len(able)}"]
    lacking = sorted((node for node in nodes if node not in able), key=lambda node: node.address)
    for node in lacking[:4]:
        bundle = next((one for one in made if f"node:{node.address}" in one), made[0])
        lines.append(f"{node.address} has {_lacks(_without_pin(bundle), node)}")
    if len(lacking) > 4:
        lines.append(f"and {len(lacking) - 4} more")
    return "; ".join(lines)


def _lacks(bundle: Bundle, node: RayNode) -> str:
    """Says of which resources a node has too little."""
    parts = []
    for name, amount in bundle.items():
        total = node.total.get(name, 0.0)
        free = node.free.get(name, 0.0)
        if total < amount:
            parts.append(f"{name} {total:g} of {amount:g}")
        elif free < amount:
            parts.append(f"{name} {amount:g}, of which {free:g} free")
    return ", ".join(parts) or "enough, and a bundle already"


def _without_pin(bundle: Bundle) -> Bundle:
    return {name: amount for name, amount in bundle.items() if not name.startswith("node:")}


def _amounts(bundle: Bundle) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items()) or "nothing"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
