"""Chooses what watches the log-probs of a job that names nothing (``sentinel.use: auto``).

It chooses gcore-sentinel's ``sentinel`` where that is installed, else the core's own ``core/band``.
A sentinel is built on the trainer's ranks too, and a policy with an interpreter of its own may lack
the plugin there: such a job gets ``sentinel/band``, whose ranks build what the core has.

The choice is told in a note, so that an installation changes no run in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core.config.catalog import Catalog
from gcore_core.config.default_balancer import BalancerChoice
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.installing import find_installed, install_command
from gcore_core.contract.job_settings import AUTO, POLICY

SEQUENTIAL = "sentinel"
SEARCHING_BAND = "sentinel/band"
BAND = "core/band"

#: A setting of it that ``core/band`` lacks.
CANARIES = "canaries"


def setting_elsewhere(reference: str, settings: Iterable[str]) -> str:
    """Returns who has a setting that was given to ``core/band``; "": it is no such setting.

    reference: the provider that it was given to.
    """
    if reference != BAND or CANARIES not in settings:
        return ""
    name = f"gcore-{SEQUENTIAL}"
    if find_installed(name):
        return f"set sentinel.use={SEARCHING_BAND}, which has {CANARIES}"
    return f"{SEARCHING_BAND} of {name} has {CANARIES}: {install_command(name)}"


def choose(core: Mapping[str, Any], installed: Catalog) -> BalancerChoice | None:
    """Returns the sentinel that ``auto`` stands for; None where one is named.

    core: the core's own values.
    """
    if core["sentinel"]["use"] != AUTO:
        return None
    try:
        installed.get(SEQUENTIAL, where="sentinel.use")
    except GcoreError:
        return BalancerChoice(
            use=BAND,
            reason=f"auto: plugin {SEQUENTIAL} is not installed, or may not be used",
            note=f"sentinel.use is {BAND}, as plugin {SEQUENTIAL} is not installed or may not be "
            f"used; gcore-{SEQUENTIAL} also scores {CANARIES}, watches low precision and looks for "
            "an alarm's cause",
        )
    if (core["roles"].get(POLICY) or {}).get("python"):
        return BalancerChoice(
            use=SEARCHING_BAND,
            reason=f"auto: roles.{POLICY}.python is another interpreter",
            note=f"sentinel.use is {SEARCHING_BAND}, as roles.{POLICY} has an interpreter of its "
            f"own; where gcore-{SEQUENTIAL} is installed there, sentinel.use={SEQUENTIAL} also "
            "watches low precision",
        )
    return BalancerChoice(
        use=SEQUENTIAL,
        reason=f"auto: plugin {SEQUENTIAL} is installed",
        note=f"sentinel.use is {SEQUENTIAL}, as gcore-{SEQUENTIAL} is installed",
    )
