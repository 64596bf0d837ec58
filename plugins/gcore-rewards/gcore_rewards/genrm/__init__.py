"""The plugin ``genrm``: generative rewards, for which a generator role judges the completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.looking import Look
from gcore_rewards.genrm.config import PairwiseConfig, PointwiseConfig, RubricConfig


@hookimpl
def gcore_rewards() -> Iterable[p.RewardProvider]:
    yield p.RewardProvider(
        summary="a judge gives each completion a score",
        factory="gcore_rewards.genrm.judges:PointwiseJudge",
        config=PointwiseConfig,
        twin="gcore_rewards.genrm.twins:twin_of_judge",
    )
    yield p.RewardProvider(
        name="rubric",
        summary=(
            "a judge gives each completion a score by every criterion of a list; their "
            "weighted mean"
        ),
        factory="gcore_rewards.genrm.judges:RubricJudge",
        config=RubricConfig,
        twin="gcore_rewards.genrm.twins:twin_of_rubric",
    )
    yield p.RewardProvider(
        name="pairwise",
        summary=(
            "a judge compares the completions of a prompt in pairs; win rates or "
            "Bradley-Terry strengths"
        ),
        factory="gcore_rewards.genrm.pairwise:PairwiseJudge",
        config=PairwiseConfig,
        level="group",
    )


@hookimpl
def gcore_check_files(
    plan: Mapping[str, Any], datasets: Mapping[str, Dataset]
) -> Iterable[str | Look]:
    """Yields problems with the questions that judges are asked about the rows."""
    from gcore_rewards.genrm.checks import problems

    yield from problems(plan, datasets)
