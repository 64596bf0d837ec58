"""The plugin ``algorithms``: rewards to advantages, log-probs to a loss, and penalties of long and
of repetitive completions.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_algorithms import config
from gcore_core import hookimpl
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.providers import AdvantageProvider, ObjectiveProvider, RewardProvider

_TORCH = ("torch>=2.6",)


@hookimpl
def gcore_advantages() -> Iterable[AdvantageProvider]:
    yield AdvantageProvider(
        name="grpo",
        summary="reward minus the group's mean, over the group's standard deviation (GRPO)",
        factory="gcore_algorithms.advantages:Grpo",
        config=config.GrpoConfig,
    )
    yield AdvantageProvider(
        name="dr-grpo",
        summary="reward minus the group's mean (Dr.GRPO)",
        factory="gcore_algorithms.advantages:DrGrpo",
        config=config.DrGrpoConfig,
    )
    yield AdvantageProvider(
        name="rloo",
        summary="reward minus the mean of the group's other rewards (RLOO)",
        factory="gcore_algorithms.advantages:Rloo",
        config=config.RlooConfig,
    )
    yield AdvantageProvider(
        name="reinforce-pp",
        summary="reward normalised over the whole batch (REINFORCE++)",
        factory="gcore_algorithms.advantages:ReinforcePp",
        config=config.ReinforcePpConfig,
    )
    yield AdvantageProvider(
        name="reinforce-pp-baseline",
        summary=(
            "reward minus the group's mean, over the batch's standard deviation (REINFORCE++ "
            "with baseline)"
        ),
        factory="gcore_algorithms.advantages:ReinforcePpBaseline",
        config=config.ReinforcePpBaselineConfig,
    )
    yield AdvantageProvider(
        name="gdpo",
        summary="each named reward normalised by itself, then their sum over the batch (GDPO)",
        factory="gcore_algorithms.advantages:Gdpo",
        config=config.GdpoConfig,
    )
    yield AdvantageProvider(
        name="gae",
        summary="generalised advantage estimation from per-action values (GAE)",
        factory="gcore_algorithms.advantages:Gae",
        config=config.GaeConfig,
        level="action",
    )


@hookimpl
def gcore_objectives() -> Iterable[ObjectiveProvider]:
    yield ObjectiveProvider(
        name="ppo_clip",
        summary="clipped ratio per action, asymmetric and dual clip (PPO, GRPO, DAPO)",
        factory="gcore_algorithms.objectives:PpoClip",
        config=config.PpoClipConfig,
        needs=_TORCH,
    )
    yield ObjectiveProvider(
        name="gspo",
        summary="clipped ratio of the whole sequence (GSPO)",
        factory="gcore_algorithms.objectives:Gspo",
        config=config.GspoConfig,
        needs=_TORCH,
    )
    yield ObjectiveProvider(
        name="cispo",
        summary=(
            "log-prob weighted by a clipped, constant ratio; no action loses its gradient (CISPO)"
        ),
        factory="gcore_algorithms.objectives:Cispo",
        config=config.CispoConfig,
        needs=_TORCH,
    )
    yield ObjectiveProvider(
        name="sapo",
        summary="a sigmoid gate on the ratio of each action, in place of a clip (SAPO)",
        factory="gcore_algorithms.objectives:Sapo",
        config=config.SapoConfig,
        needs=_TORCH,
    )


@hookimpl
def gcore_rewards() -> Iterable[RewardProvider]:
    yield RewardProvider(
        name="overlong",
        summary="a penalty that grows from 0 to -1 over the last actions allowed (DAPO)",
        factory="gcore_algorithms.rewards:Overlong",
        config=config.OverlongConfig,
    )
    yield RewardProvider(
        name="repetition",
        summary="a penalty of the share of n-grams that stood before in the completion",
        factory="gcore_algorithms.rewards:Repetition",
        config=config.RepetitionConfig,
    )


@hookimpl
def gcore_check(job: ResolvedJob) -> Iterable[str]:
    """Yields what an advantage or an objective of this plugin needs of trainers and generators."""
    from gcore_algorithms.checks import problems_of

    return problems_of(job)
