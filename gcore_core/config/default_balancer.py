"""Chooses the balancer of a job that names none (``balance.use: auto``).

Ranks of a trainer wait for the slowest, so a policy with several slots gets the plugin ``balance``
where it is installed: it deals records by what they cost, and learns that from measured seconds. A
policy with one slot has nothing to balance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcore_core.config.catalog import Catalog
from gcore_core.config.homes import home_of
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.installing import install_command
from gcore_core.contract.job_settings import AUTO, POLICY

BY_COST = "balance"
IN_ORDER = "core/in-order"


@dataclass(frozen=True, kw_only=True)
class BalancerChoice:
    """Says which provider a section's ``use: auto`` stands for, and why.

    use: what ``use`` becomes.
    reason: why, as the origin of the value (``Plan.why``).
    note: what ``g-core check`` and a run's start say of it: what it is, and what would change it.
        Empty where an installation changes nothing.
    """

    use: str
    reason: str
    note: str = ""


def choose(
    core: Mapping[str, Any], merged: DictConfig, installed: Catalog
) -> BalancerChoice | None:
    """Returns the balancer that ``auto`` stands for; None where one is named.

    core: the core's own values.
    merged: the tree that they come from, in which ``slots`` may refer to another key.
    """
    if core["balance"]["use"] != AUTO:
        return None
    slots = _slots(merged)
    if slots == 1:
        return BalancerChoice(use=IN_ORDER, reason="auto: the policy has one slot")
    try:
        installed.get(BY_COST, where="balance.use")
    except GcoreError:
        reason = f"auto: plugin {BY_COST} is not installed, or may not be used"
        note = (
            f"balance.use is {IN_ORDER}: records are dealt to the trainer's ranks in order, "
            f"whatever they cost, since plugin {BY_COST} is not installed or may not be used "
            f"({install_command(home_of(BY_COST))})"
        )
        return BalancerChoice(use=IN_ORDER, reason=reason, note=note)
    deterministic = bool(core["run"]["deterministic"])
    learns = (
        "it learns no costs, since run.deterministic is true"
        if deterministic
        else "it learns costs from measured seconds, so two runs may differ in the last bits; "
        "run.deterministic: true makes them repeat"
    )
    return BalancerChoice(
        use=BY_COST,
        reason="auto: the policy has several slots",
        note=f"balance.use is {BY_COST}, as the policy has several slots and {home_of(BY_COST)} is "
        f"installed: {learns}; balance.use={IN_ORDER} deals records in order",
    )


def _slots(merged: DictConfig) -> int:
    """Returns the policy's slots.

    A value that refers to a default of a plugin is not known yet: it counts as several.
    """
    try:
        slots = OmegaConf.select(merged, f"roles.{POLICY}.slots", default=1)
    except OmegaConfBaseException:
        return 2
    return slots if isinstance(slots, int) else 2
