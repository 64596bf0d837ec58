"""The plugin named ``deepspeed``: a trainer on DeepSpeed's ZeRO for any Hugging Face causal
language model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_language.context.settings import problems as context_problems
from gcore_language.lora_settings import is_of, problems

from gcore_core import hookimpl
from gcore_core.contract.looking import Look
from gcore_core.contract.providers import TrainerProvider, VenvProvider
from gcore_deepspeed import arguments
from gcore_deepspeed.config import DeepSpeedTrainerConfig


@hookimpl
def gcore_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        summary="DeepSpeed: AdamW with ZeRO 1, 2 or 3 on a Hugging Face causal language model",
        factory="gcore_deepspeed.trainer:make_trainer",
        memory="gcore_deepspeed.memory:trainer_memory",
        opens="gcore_language.opened:open_policy",
        twin="gcore_language.twins:twin_of_role",
        config=DeepSpeedTrainerConfig,
        needs=("deepspeed>=0.19.8,<0.20", "torch>=2.7", "transformers>=5.0"),
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields the problems with adapters, names under ``engine:`` and shared contexts."""
    for name, role in plan["roles"].items():
        if is_of(role, "deepspeed"):
            yield from problems(role, f"roles.{name}.config.lora")
            yield from arguments.problems(role.get("engine") or {}, name)
            yield from context_problems(plan, name)


@hookimpl
def gcore_check_files(plan: Mapping[str, Any], here: bool) -> Iterable[str | Look]:
    """Yields problems with the models of this plugin's roles, and looks at them."""
    from gcore_language.model_places import problems as model_problems

    yield from model_problems(plan, "deepspeed", here, images=False)


@hookimpl
def gcore_venvs() -> Iterable[VenvProvider]:
    beside = ("gcore-algorithms",)  # objectives run in the trainer
    yield VenvProvider(
        name="cpu",
        summary="DeepSpeed for machines without CUDA",
        engine="deepspeed",
        requirements="gcore_deepspeed:cpu.txt",
        beside=beside,
    )
    yield VenvProvider(
        name="cuda",
        summary="DeepSpeed for CUDA",
        engine="deepspeed",
        extras=("engine",),
        beside=beside,
    )
