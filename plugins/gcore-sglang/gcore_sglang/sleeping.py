"""Provides ``sglang/sleeping``: SGLang with its memory saver, which needs CUDA.

It is written for SGLang 0.5.23 and has not been run.
"""

from __future__ import annotations

from dataclasses import replace

from gcore_language.sleeping import EngineSleeps, with_arguments

from gcore_core.contract.context import WorkerContext
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.engine import SglangGenerator

#: The memory saver frees the device's memory; the backup keeps the weights on the host, else they
#: would be lost.
_SAVER = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}


class SleepingSglangGenerator(EngineSleeps, SglangGenerator):
    """A generator that gives the device's memory back while it sleeps.

    See ``gcore_core.contract.generator.Sleeps``. Samples that run go back to SGLang's queue; after
    the sleep their prompts and actions are read again.
    """

    def __init__(self, config: SglangGeneratorConfig, context: WorkerContext) -> None:
        super().__init__(config, replace(context, engine=with_arguments(context, _SAVER, "sglang")))

    def release_memory(self) -> None:
        """Gives the memory of weights and cache back; see ``EngineSleeps``."""
        self._call("/pause_generation", {"mode": "retract"})
        self._call("/release_memory_occupation", {})

    def take_memory(self) -> None:
        """Takes the memory again and goes on with the samples; see ``EngineSleeps``."""
        self._call("/resume_memory_occupation", {})
        self._call("/continue_generation", {})
