"""Says of a trainer that replays experts that nobody tells it which: for ``gcore_check``."""

from __future__ import annotations

from collections.abc import Iterator

from gcore_core.contract.job_settings import POLICY, ROLLOUT
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.traits import traits_of


def problems(job: ResolvedJob) -> Iterator[str]:
    """Yields a problem where the generator does not say which experts computed a token.

    It is for a policy whose settings have experts replayed always.
    """
    rollout = job.provided.get(f"roles.{ROLLOUT}")
    if rollout is None:
        return
    if not traits_of(job.objects.get(f"roles.{ROLLOUT}")).routing:
        yield (
            f"roles.{ROLLOUT}.use: {rollout.reference} does not say under these settings which "
            f"experts computed a token, and {job.provided[f'roles.{POLICY}'].reference}, which "
            f"roles.{POLICY} uses, is to replay them; take a generator with the trait routing, "
            "such as torch, or settings that have it, or set roles.policy.config not to need them."
        )
