"""The plugin ``rewards``: verifiers, which compare a completion with its row's answer or run it,
and services.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.looking import Look
from gcore_rewards.config import CodeConfig, HttpConfig, MathConfig, VerifierConfig


@hookimpl
def gcore_rewards() -> Iterable[p.RewardProvider]:
    yield p.RewardProvider(
        name="exact-match",
        summary="1 where the answer equals the row's, else 0",
        factory="gcore_rewards.verifiers:ExactMatch",
        config=VerifierConfig,
    )
    yield p.RewardProvider(
        name="numeric",
        summary="1 where the answer is the same number as the row's, else 0",
        factory="gcore_rewards.verifiers:Numeric",
        config=VerifierConfig,
    )
    yield p.RewardProvider(
        name="math",
        summary="1 where the answer equals the row's as an expression, by math-verify, else 0",
        factory="gcore_rewards.expressions:MathReward",
        config=MathConfig,
        needs=("math-verify>=0.9",),
    )
    yield p.RewardProvider(
        name="code",
        summary="1 where the completion's code passes its row's tests, run confined, else 0",
        factory="gcore_rewards.code:CodeReward",
        config=CodeConfig,
    )
    yield p.RewardProvider(
        name="http",
        summary="a service that scores records, over HTTP",
        factory="gcore_rewards.service:HttpReward",
        config=HttpConfig,
        needs=("httpx2>=2.0",),
    )


@hookimpl
def gcore_check_files(
    plan: Mapping[str, Any], here: bool, datasets: Mapping[str, Dataset]
) -> Iterable[Look]:
    from gcore_rewards.checks import looks

    return looks(plan, here, datasets)
