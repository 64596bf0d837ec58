"""Checks that the memory of the host holds the weights that sleeping generators keep there.

Generators that take turns on their devices keep their weights in the host's memory while they
sleep, so that waking one costs a copy.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore_core.config.plan import Plan
from gcore_core.contract.errors import PlacementError
from gcore_core.contract.traits import traits_of
from gcore_core.run.initial_placement import Placed

GIB = 2**30


def host_memory(
    plan: Plan,
    placed: Placed,
    models: Mapping[str, Mapping[str, Any]],
    host_bytes: int = 0,
) -> str:
    """Says in one sentence what stays in host memory; "" where nobody sleeps or nothing is kept.

    models: role -> its ``model:`` mapping; a model's bytes are its safetensors files', and
        are not known where its path is no directory with such files, as for a name on the hub.
    host_bytes: the memory of a node; 0: as much as this machine has.
    Raises PlacementError when a node would have to keep more than it has.
    """
    host_bytes = host_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bytes_by_node, unknown = _kept_bytes(plan, placed, models)
    besides = ""
    if unknown:
        besides = f"; of {', '.join(unknown)} it is not known: no safetensors files lie at its path"
    if not any(by_role.total() for by_role in bytes_by_node.values()):
        return f"generators that sleep keep weights in host memory{besides}" if unknown else ""
    # The fullest node.
    node, by_role = max(bytes_by_node.items(), key=lambda item: item[1].total())
    place = placed.host(node)
    kept_gib = by_role.total() / GIB
    host_gib = host_bytes / GIB
    if by_role.total() > host_bytes:
        shares = [f"{role}: {nbytes / GIB:.2f} GiB" for role, nbytes in by_role.most_common()]
        raise PlacementError(
            f"generators that sleep would keep {kept_gib:.2f} GiB of weights in the memory of "
            f"{place}, which has {host_gib:.2f} GiB",
            where="roles",
            why=", ".join(shares),
            todo=(
                "take fewer slots or smaller models, or config.sleep: discard where a backend "
                "has it"
            ),
            role=by_role.most_common(1)[0][0],
        )
    return (
        f"generators that sleep keep {kept_gib:.2f} of {host_gib:.2f} GiB of the memory of "
        f"{place}{besides}"
    )


def _kept_bytes(
    plan: Plan, placed: Placed, models: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Returns node -> the bytes that sleeping generators keep in its memory, by role; and the roles
    for which it is not known.
    """
    node_of = {device.index: device.node for device in placed.window.devices}
    sleepers = placed.sleeps if placed.moves else placed.asleep_in_training
    bytes_by_node: dict[str, Counter[str]] = {}
    unknown = []
    for role, workers in placed.workers.items():
        if role not in sleepers or traits_of(plan.objects[f"roles.{role}"]).drops_weights:
            continue
        path = models[role].get("path")
        nbytes = _weights_bytes(path)
        if path and not nbytes:
            unknown.append(role)
        for devices in workers:
            bytes_by_node.setdefault(node_of[devices[0]], Counter())[role] += nbytes
    return bytes_by_node, unknown


def _weights_bytes(path: str | None) -> int:
    if not path:
        return 0
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
