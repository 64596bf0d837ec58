"""The plugin ``sglang`` samples from a policy with SGLang's server, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.looking import Look
from gcore_core.contract.providers import GeneratorProvider, VenvProvider
from gcore_sglang.config import (
    DeterministicSglangGeneratorConfig,
    SglangGeneratorConfig,
    SleepingSglangGeneratorConfig,
)

#: What the engine's venv must have. How to get it depends on the machine, so ``gcore_check`` says
#: what is missing.
ENGINE = "sglang>=0.5.23,<0.6"

#: What the engine makes in shared memory: slots of loads, buffers of tensors, and semaphores.
SHARED_MEMORY = ("sglang_loads_*", "sgl_shm_*", "multi_tokenizer_args_*", "psm_*", "sem.mp-*")


@hookimpl
def gcore_generators() -> Iterable[GeneratorProvider]:
    yield GeneratorProvider(
        summary="SGLang: radix cache, a server of its own, weight pushes into the running engine",
        factory="gcore_sglang.engine:SglangGenerator",
        config=SglangGeneratorConfig,
        shared_memory=SHARED_MEMORY,
        memory="gcore_sglang.memory:generator_memory",
        twin="gcore_language.twins:twin_of_generator",
    )
    yield GeneratorProvider(
        name="deterministic",
        summary="the same, and repeats a sample bit for bit from its seed; slower",
        factory="gcore_sglang.deterministic:DeterministicSglangGenerator",
        config=DeterministicSglangGeneratorConfig,
        shared_memory=SHARED_MEMORY,
        memory="gcore_sglang.memory:generator_memory",
        twin="gcore_language.twins:twin_of_generator",
    )
    yield GeneratorProvider(
        name="sleeping",
        summary="the same on CUDA, and gives the device's memory back while it sleeps; not run yet",
        factory="gcore_sglang.sleeping:SleepingSglangGenerator",
        config=SleepingSglangGeneratorConfig,
        shared_memory=SHARED_MEMORY,
        memory="gcore_sglang.memory:generator_memory",
        twin="gcore_language.twins:twin_of_generator",
    )


@hookimpl
def gcore_venvs() -> Iterable[VenvProvider]:
    yield VenvProvider(
        name="cpu",
        summary="SGLang for machines without CUDA",
        engine="sglang",
        requirements="gcore_sglang:cpu.txt",
        no_deps=True,  # SGLang asks for a torch and for kernels that are built for CUDA
    )
    yield VenvProvider(name="cuda", summary="SGLang for CUDA", engine="sglang", extras=("engine",))


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields problems with adapters, split models, names under ``engine:``, and interpreters.

    An interpreter must have ``ENGINE``.
    """
    from gcore_core.contract.errors import ConfigError
    from gcore_core.kits.commands import open_interpreter
    from gcore_sglang.arguments import problems

    for name, role in plan["roles"].items():
        if role["use"].partition("/")[0] != "sglang":
            continue
        yield from check_adapter(name, plan["roles"])
        yield from check_split(name, role)
        yield from problems(role.get("engine") or {}, name)
        try:
            interpreter = open_interpreter(role["python"], where=f"roles.{name}.python")
        except ConfigError:
            continue  # the core reports it
        for need, have in interpreter.unmet([ENGINE]):
            yield (
                f"roles.{name}.python: {interpreter.python} has "
                f"{f'sglang {have}' if have else 'no SGLang'}, but this "
                f"needs {need}; make a venv that has it: g-core venv create sglang, and "
                "name it: "
                "python: venv:sglang."
            )


@hookimpl
def gcore_check_files(
    plan: Mapping[str, Any], here: bool, datasets: Mapping[str, Dataset]
) -> Iterable[str | Look]:
    """Yields problems with the models of this plugin's roles and with what these are asked, and
    looks at them.
    """
    from gcore_language.model_places import problems as model_problems
    from gcore_language.prompt_places import problems as prompt_problems

    yield from model_problems(plan, "sglang", here, kind="engine")
    yield from prompt_problems(plan, "sglang", datasets)


def check_split(name: str, role: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem where a model that devices share is to do what was never tried with it."""
    config = role.get("config", {})
    count = config.get("tensor_parallel", 1)
    if count == 1:
        return
    where = f"roles.{name}.config.tensor_parallel"
    if role["use"] == "sglang/deterministic":
        yield (
            f"{where}: that samples of a model on {count} devices repeat from their seeds was not "
            "tried, since sums over devices may be added up in another order; set it to 1, or take "
            "use: sglang, which promises no repetition."
        )
    if config.get("lora_rank", 0):
        yield (
            f"{where}: adapters pushed into a model on {count} devices were not tried; set it to "
            f"1, or roles.{name}.config.lora_rank to 0 for whole weights."
        )


def check_adapter(name: str, roles: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem where SGLang would refuse what the policy pushes.

    name: of a role of this plugin, one of ``roles``.
    """
    role = roles[name]
    room = role.get("config", {}).get("lora_rank", 0)
    followed = roles.get("policy" if name == "rollout" else role.get("follows") or "")
    if not room or followed is None:
        return
    lora = followed.get("config", {}).get("lora") or {}
    rank = lora.get("rank", 0)
    trains_adapters = rank > 0 or bool(lora.get("path"))
    if not trains_adapters or lora.get("push", "auto") == "merged":
        yield (
            f"roles.{name}.config.lora_rank: the policy pushes whole weights, and SGLang with room "
            "for adapters takes these alone; set it to 0."
        )
    elif rank > room:
        yield (
            f"roles.{name}.config.lora_rank: the policy pushes adapters of rank {rank}, and this "
            f"generator keeps room for {room}; set it to {rank}."
        )
