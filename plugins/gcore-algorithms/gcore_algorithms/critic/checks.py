"""What ``g-core check`` refuses of a job with a critic."""

from __future__ import annotations

from collections.abc import Iterator

from gcore_algorithms.critic import COLUMNS, CRITIC
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.traits import traits_of


def problems_of(job: ResolvedJob) -> Iterator[str]:
    """Yields one sentence for each problem of a resolved job, its path first."""
    if CRITIC in job.settings.roles:
        yield from _values(job)


def _values(job: ResolvedJob) -> Iterator[str]:
    """The critic gives values, and the advantage is made of them."""
    path = f"roles.{CRITIC}"
    trainer = job.provided[path]
    if not traits_of(job.objects.get(path)).annotates:
        yield (
            f"{path}.use: {trainer.reference} gives no columns, and this role must give "
            f"{', '.join(COLUMNS)}; take a trainer with the trait annotates, such as torch."
        )
    advantage = job.provided.get("advantage")
    if not traits_of(job.objects.get("advantage")).requires & set(COLUMNS):
        yield (
            f"{path}: nothing requires what it gives ({', '.join(COLUMNS)}); choose an "
            "advantage that does, such as algorithms/gae, or leave the role out."
        )
    level = getattr(advantage.spec, "level", "") if advantage else ""
    if job.settings.roles[CRITIC].head_start and level != "action":
        yield (
            f"{path}.head_start: needs an advantage that is computed for each action, such "
            "as algorithms/gae; leave it out."
        )
