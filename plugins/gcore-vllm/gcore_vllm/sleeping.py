"""Provides ``vllm/sleeping``: vLLM with its sleep mode, which needs CUDA.

It is written for vLLM 0.32 and has not been run.
"""

from __future__ import annotations

from dataclasses import replace

from gcore_language.sleeping import EngineSleeps, with_arguments

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WorkerError
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.engine import VllmGenerator

#: Weights go to host memory, the cache is dropped.
_LEVEL = 1


class SleepingVllmGenerator(EngineSleeps, VllmGenerator):
    """A generator that gives the device's memory back while it sleeps.

    See ``gcore_core.contract.generator.Sleeps``. Prompts and actions of samples that run are read
    again after the wake.
    """

    def __init__(self, config: VllmGeneratorConfig, context: WorkerContext) -> None:
        engine = with_arguments(context, {"enable_sleep_mode": True}, "vllm")
        super().__init__(config, replace(context, engine=engine))

    def release_memory(self) -> None:
        """Moves the weights to host memory and drops the cache; raises WorkerError if vLLM keeps
        some.
        """
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise WorkerError("vLLM kept keys and values, so it cannot sleep.", where="vllm")
        self._engine.sleep(_LEVEL, "keep")  # its default would abort what runs

    def take_memory(self) -> None:
        """Moves the weights back. Raises WorkerError when vLLM does not wake up."""
        if not self._engine.wake_up():
            raise WorkerError("vLLM did not wake up.", where="vllm")
