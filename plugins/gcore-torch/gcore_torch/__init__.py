"""The plugin ``torch`` has a trainer, a generator and scalar rewards for Hugging Face models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gcore_language.context.settings import problems as context_problems
from gcore_language.engine_arguments import without_engine
from gcore_language.lora_settings import is_of, problems

from gcore_core import hookimpl
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.looking import Look
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.providers import GeneratorProvider, RewardProvider, TrainerProvider
from gcore_torch.config import TorchGeneratorConfig, TorchRewardConfig, TorchTrainerConfig
from gcore_torch.offload_settings import problems as offload_problems
from gcore_torch.sharding_settings import problems as sharding_problems
from gcore_torch.value_head_settings import problems as value_head_problems

_NEEDS = ("torch>=2.7", "transformers>=5.0", "safetensors>=0.5")


@hookimpl
def gcore_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        summary="AdamW on a Hugging Face causal language model; several slots share it by FSDP2",
        factory="gcore_torch.trainer:make_trainer",
        config=TorchTrainerConfig,
        needs=_NEEDS,
        memory="gcore_torch.memory:trainer_memory",
        opens="gcore_language.opened:open_policy",
        twin="gcore_language.twins:twin_of_role",
    )


@hookimpl
def gcore_generators() -> Iterable[GeneratorProvider]:
    yield GeneratorProvider(
        summary=(
            "a batched key-value cache: own decoder for Llama, Mistral and Qwen, "
            "transformers' for others"
        ),
        factory="gcore_torch.generator:TorchGenerator",
        config=TorchGeneratorConfig,
        needs=_NEEDS,
        memory="gcore_torch.memory:generator_memory",
        twin="gcore_language.twins:twin_of_generator",
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any], job: ResolvedJob) -> Iterable[str]:
    """Yields problems with settings of this plugin's roles, and with what they need of others."""
    roles = plan["roles"]
    yield from _other_dtypes(roles)
    for name, role in roles.items():
        if is_of(role, "torch"):
            yield from problems(role, f"roles.{name}.config.lora")
            yield from without_engine(name, role)
            yield from context_problems(plan, name)
            yield from sharding_problems(plan, name)
            yield from offload_problems(plan, name)
            yield from value_head_problems(job, name)


@hookimpl
def gcore_check_files(
    plan: Mapping[str, Any], here: bool, datasets: Mapping[str, Dataset]
) -> Iterable[str | Look]:
    """Yields problems with the models of this plugin's roles and rewards, and with what these are
    asked, and looks at them.
    """
    from gcore_language.model_places import path_problems
    from gcore_language.model_places import problems as model_problems
    from gcore_language.prompt_places import problems as prompt_problems
    from gcore_language.prompt_places import reading_problems

    yield from model_problems(plan, "torch", here)
    yield from prompt_problems(plan, "torch", datasets)
    if here:
        yield from _narrow_dtypes(plan["roles"])
    for name, reward in plan.get("rewards", {}).items():
        if is_of(reward, "torch"):
            path = str(reward["config"]["path"])
            yield from path_problems(
                f"rewards.{name}.config.path",
                path,
                None,
                here,
                "classifier",
                trust_remote_code=bool(reward["config"]["trust_remote_code"]),
            )
            yield from reading_problems(plan, f"rewards.{name}", path, reward["config"], datasets)


def _narrow_dtypes(roles: Mapping[str, Any]) -> Iterator[Look]:
    """Yields a look at whether the devices here are faster in a role's 16-bit dtype."""
    for name, role in roles.items():
        dtype = (role.get("config") or {}).get("dtype", "float32")
        if is_of(role, "torch") and dtype != "float32":
            yield Look(
                where=f"roles.{name}.config.dtype",
                python=role.get("python"),
                function="gcore_torch.narrow_dtypes:notes",
                arguments={"dtype": dtype, "cpu": "/proc/cpuinfo"},
                files=("/dev/nvidiactl",),  # there with a GPU
            )


def _other_dtypes(roles: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem for every generator of this plugin whose dtype is not the policy's.

    Such a generator converts what is pushed to its own dtype, so the bytes that it then holds are
    not those that were sent.
    """
    pushed_dtype = roles.get("policy", {}).get("config", {}).get("dtype")
    for name, role in roles.items():
        follows = name == "rollout" or role.get("follows") == "policy"
        if not follows or not is_of(role, "torch"):
            continue
        own_dtype = role["config"].get("dtype")
        if pushed_dtype is not None and own_dtype is not None and pushed_dtype != own_dtype:
            yield (
                f"roles.{name}.config.dtype: the policy pushes {pushed_dtype} weights, and this "
                f"generator would hold {own_dtype}; set it to {pushed_dtype}."
            )


@hookimpl
def gcore_rewards() -> Iterable[RewardProvider]:
    yield RewardProvider(
        summary="a scalar reward model: a Hugging Face sequence classifier with one output",
        factory="gcore_torch.reward:TorchReward",
        config=TorchRewardConfig,
        twin="gcore_language.twins:twin_of_reward",
        needs=_NEEDS,
    )
