"""Says of an objective of values that its trainer has no value head: for ``gcore_check``."""

from __future__ import annotations

from collections.abc import Iterator

from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.traits import traits_of


def problems(job: ResolvedJob, role: str, path: str) -> Iterator[str]:
    """Yields a problem where the model that an objective trains has no value head.

    role: what is trained.
    path: where the objective is chosen.
    """
    trainer = job.provided[f"roles.{role}"]
    if not traits_of(job.objects.get(f"roles.{role}")).value_head:
        yield (
            f"roles.{role}.use: {trainer.reference} has no value head, which {path} "
            f"({job.provided[path].reference}) trains; take a trainer with the trait value_head, "
            "such as torch."
        )
