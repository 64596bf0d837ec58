"""What may be set of a trainer's memory on the host, and what does not go with it.

Light: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """What lies in host memory and not on the device; by default nothing."""

    state: bool = False
    """Whether weights, gradients and the optimizer's moments lie in host memory, where the
    optimizer steps. A pass brings one layer after the other to the device.
    """
    activations: bool = False
    """Whether the layers' inputs, which ``gradient_checkpointing: true`` keeps of a micro-batch,
    wait in host memory for the backward pass.
    """

    @property
    def on(self) -> bool:
        """Whether anything lies in host memory."""
        return self.state or self.activations


def problems(plan: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yields what ``g-core check`` can know of a trainer whose state lies in host memory.

    plan: the resolved configuration.
    name: of the trainer's role.
    """
    offload = plan["roles"][name]["config"].get("offload", {})
    if not isinstance(offload, Mapping) or not offload.get("state"):
        return
    where = f"roles.{name}.config.offload.state"
    if plan.get("run", {}).get("deterministic"):
        yield (
            f"{where}: gradients that are added up exactly have not been tested in host memory, so "
            "it does not go with run.deterministic; set it to false."
        )
    if plan.get("placement", {}).get("sleep_in_rollout") == "always":
        yield (
            f"{where}: what a sleep would move to host memory lies there already, so it does not "
            "go with placement.sleep_in_rollout: always; set one of them only."
        )
