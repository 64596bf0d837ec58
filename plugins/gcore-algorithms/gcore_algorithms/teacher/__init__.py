"""The plugin ``teacher``: frozen models beside the policy, and losses that draw the policy to one.

Roles ``reference`` and ``teacher`` give log-probs of the actions; a teacher also gives its
likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_algorithms.teacher import config
from gcore_core import hookimpl
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.looking import Look
from gcore_core.contract.providers import (
    AdvantageProvider,
    AnnotatorProvider,
    ObjectiveProvider,
    RoleProvider,
)

_NEEDS = ("torch>=2.7", "transformers>=5.0", "safetensors>=0.5")


@hookimpl
def gcore_roles() -> Iterable[RoleProvider]:
    yield RoleProvider(
        name="reference",
        summary="the model that the policy is to stay near; without a model of its own, its start",
        kind="annotator",
        columns=("ref_logp",),
    )
    yield RoleProvider(
        name="teacher",
        summary="a model that the policy is to become like",
        kind="annotator",
        columns=(
            "teacher_logp",
            ColumnSpec(name=config.TOP_IDS, dtype="int32", wide=True),
            ColumnSpec(name=config.TOP_LOGP, wide=True),
        ),
    )


@hookimpl
def gcore_annotators() -> Iterable[AnnotatorProvider]:
    yield AnnotatorProvider(
        summary="log-probs under a frozen Hugging Face causal language model, on torch",
        factory="gcore_algorithms.teacher.annotator:FrozenModel",
        config=config.FrozenModelConfig,
        needs=_NEEDS,
        twin="gcore_language.twins:twin_of_role",
    )


@hookimpl
def gcore_objectives() -> Iterable[ObjectiveProvider]:
    yield ObjectiveProvider(
        name="reverse-kl",
        summary="clipped ratio; an action's advantage is how much likelier the teacher finds it",
        factory="gcore_algorithms.teacher.objectives:ReverseKl",
        config=config.ReverseKlConfig,
        needs=("torch>=2.7",),
    )
    yield ObjectiveProvider(
        name="jsd",
        summary="generalised Jensen-Shannon divergence to the teacher's likeliest tokens (GKD)",
        factory="gcore_algorithms.teacher.objectives:JensenShannon",
        config=config.JensenShannonConfig,
        needs=("torch>=2.7",),
    )


@hookimpl
def gcore_advantages() -> Iterable[AdvantageProvider]:
    yield AdvantageProvider(
        name="no-reward",
        summary="0 for every record: what is good, the teacher says",
        factory="gcore_algorithms.teacher.advantages:NoReward",
        config=config.NoRewardConfig,
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields what can be known of models and settings before anything starts."""
    from gcore_algorithms.teacher.checks import problems_of

    return problems_of(plan)


@hookimpl
def gcore_check_files(plan: Mapping[str, Any], here: bool) -> Iterable[str | Look]:
    """Yields problems with the models of this plugin's roles, and looks at them."""
    from gcore_language.model_places import problems as model_problems

    yield from model_problems(plan, "teacher", here, kind="language")
