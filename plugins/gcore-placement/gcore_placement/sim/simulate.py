"""The plugin ``simulate`` adds ``g-core simulate``, which tries placement policies.

They decide for a cluster that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="what placement policies would make of a workload, on any number of devices",
        factory="gcore_placement.sim.trying:run",
    )
