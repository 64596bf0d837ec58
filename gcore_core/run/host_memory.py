"""Whether the weights of generators that take turns on their devices fit the memory of the host,
where those that sleep
keep them: so that a change of roles costs a copy.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore_core.config.plan import Plan
from gcore_core.contract.abilities import keeps_weights
from gcore_core.contract.errors import PlacementError
from gcore_core.run.placed import Placed

GIB = 2**30


def host_memory(
    plan: Plan, placed: Placed, models: Mapping[str, Mapping[str, Any]], host_bytes: int = 0
) -> str:
    """One sentence on what stays in host memory; empty where nobody sleeps or nothing is kept.

    host_bytes: of a node; 0: what this machine has. A model's bytes are those of its files in
    safetensors. Raises PlacementError when a node would have to keep more than it has.
    """
    host_bytes = host_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    node_of = {device.index: device.node for device in placed.window.devices}
    kept: dict[str, Counter[str]] = {}
    for role, workers in placed.workers.items():
        sleeps = role in (placed.sleeps if placed.moves else placed.resting)
        if sleeps and keeps_weights(plan.objects[f"roles.{role}"]):
            path = models[role].get("path")
            nbytes = (
                sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if path else 0
            )
            for devices in workers:
                kept.setdefault(node_of[devices[0]], Counter())[role] += nbytes
    if not any(by_role.total() for by_role in kept.values()):
        return ""
    node, by_role = max(kept.items(), key=lambda item: item[1].total())
    told = f"{by_role.total() / GIB:.2f} of {host_bytes / GIB:.2f} GiB of the memory of {node}"
    if by_role.total() > host_bytes:
        raise PlacementError(
            f"generators that sleep would keep {told}",
            where="roles",
            why=", ".join(
                f"{role}: {nbytes / GIB:.2f} GiB" for role, nbytes in by_role.most_common()
            ),
            todo=(
                "take fewer slots or smaller models, or config.sleep: discard where a backend "
                "has it"
            ),
            role=by_role.most_common(1)[0][0],
        )
    return f"generators that sleep keep {told}"
