"""The plugin named ``megatron``: a trainer on Megatron-Core, for policies that one device cannot
hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_language.lora_settings import is_of

from gcore_core import hookimpl
from gcore_core.contract.looking import Look
from gcore_core.contract.providers import TrainerProvider, VenvProvider
from gcore_megatron import arguments, split_checks
from gcore_megatron.config import MegatronTrainerConfig


@hookimpl
def gcore_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        summary=(
            "AdamW on Megatron-Core: tensor, pipeline, context, expert and data parallel, for "
            "Llama, Mistral, Mixtral and Qwen"
        ),
        factory="gcore_megatron.trainer:make_trainer",
        memory="gcore_megatron.memory:trainer_memory",
        opens="gcore_language.opened:open_policy",
        twin="gcore_language.twins:twin_of_role",
        config=MegatronTrainerConfig,
        needs=("megatron-core>=0.16.1,<0.17", "psutil>=7", "torch>=2.7"),
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields the problems with names under ``engine:``, and with experts that slots share."""
    for name, role in plan["roles"].items():
        if is_of(role, "megatron"):
            yield from arguments.problems(role.get("engine") or {}, name)
            yield from split_checks.problems(plan, name)


@hookimpl
def gcore_check_files(plan: Mapping[str, Any], here: bool) -> Iterable[str | Look]:
    """Yields problems with the models of this plugin's roles, and looks at them."""
    from gcore_language.model_places import problems as model_problems

    yield from model_problems(plan, "megatron", here, images=False)


@hookimpl
def gcore_venvs() -> Iterable[VenvProvider]:
    beside = ("gcore-algorithms",)  # objectives run in the trainer
    yield VenvProvider(
        name="cpu",
        summary="Megatron-Core for machines without CUDA",
        engine="megatron-core",
        requirements="gcore_megatron:cpu.txt",
        beside=beside,
    )
    yield VenvProvider(
        name="cuda",
        summary="Megatron-Core for CUDA",
        engine="megatron-core",
        extras=("engine",),
        beside=beside,
    )
