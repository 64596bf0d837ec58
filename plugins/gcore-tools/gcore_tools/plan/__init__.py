"""The plugin ``plan``: ``g-core plan`` says what a job needs on each device, and every job is told
before it starts whether it fits. Looks of other plugins are answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gcore_core import hookimpl
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.looking import Look, Seen
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
def gcore_answer_looks(looks: Sequence[tuple[str, Look]], say: Callable[[str], None]) -> Seen:
    """What the looks find, each called in a helper process of its interpreter."""
    from gcore_tools.plan.looking import look_at

    return look_at(looks, say)


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
