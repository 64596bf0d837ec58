"""The plugin ``plan``: ``g-core plan`` says what a job needs on each device, and every job is told
before it starts whether it fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gcore_core import hookimpl
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.preflight import PlacedJob, ResolvedJob
from gcore_core.contract.providers import CommandProvider

SUMMARY = "say what a job needs on each device, before anything starts"


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary=SUMMARY,
        factory="gcore_tools.plan.command:run",
        parser="gcore_tools.plan.command:make_parser",
    )


@hookimpl
def gcore_preflight(
    job: ResolvedJob, placed: PlacedJob, overrides: Sequence[str], facts: Mapping[str, int]
) -> Iterable[str | GcoreError]:
    """A note for each pool of memory that a full step may be too large for, and an error for a job
    that cannot fit.
    """
    from gcore_tools.plan.memory_fit import check_memory

    try:
        return check_memory(job, placed, placed.nodes, overrides, facts=facts)
    except GcoreError as error:
        return [error]
