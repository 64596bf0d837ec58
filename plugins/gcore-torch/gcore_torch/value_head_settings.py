"""Says what the policy's own value head excludes, before a run: for ``gcore_check``."""

from __future__ import annotations

from collections.abc import Iterator

from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.traits import traits_of


def problems(job: ResolvedJob, role: str) -> Iterator[str]:
    """Yields a problem where a value head on a trainer's own trunk is of no use.

    Only the policy has an advantage of its own, which requires the head's values, and no other role
    gives any.

    role: of a trainer of this plugin.
    """
    own = traits_of(job.objects.get(f"roles.{role}")).own_columns
    if not own:
        return
    names = ", ".join(sorted(own))
    if role != POLICY:
        yield (
            f"roles.{role}.config: computes {names} for an advantage of its own, and only "
            f"roles.{POLICY} has one; leave that out."
        )
        return
    if not own & traits_of(job.objects.get("advantage")).requires:
        yield (
            f"roles.{role}.config: computes {names}, and the advantage requires none of them; "
            "choose one that does, such as algorithms/gae, or leave that out."
        )
    for other, columns in job.columns.items():
        for name in sorted(own & {column.name for column in columns}):
            yield (
                f"roles.{role}.config: computes {name!r}, as roles.{other} does; leave "
                "one of them out."
            )
