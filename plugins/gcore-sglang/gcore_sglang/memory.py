"""Says how much memory a server of SGLang will need. It imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Iterator

from gcore_language.memory import NBYTES, of_paged_engine

from gcore_core.contract.memory import MemoryNeed, WorkerShape
from gcore_sglang.config import SglangGeneratorConfig

#: Of a cache whose size is not set, on a CPU.
_CPU_CACHE_TOKENS = 16384


def generator_memory(config: SglangGeneratorConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
    """Yields what a replica needs on each device, see ``gcore_core.contract.memory``."""
    on_cpu = worker.device == "cpu"
    tokens = config.kv_cache_tokens or (_CPU_CACHE_TOKENS if on_cpu else None)
    size = NBYTES[config.dtype]
    yield from of_paged_engine(
        config,
        worker,
        engine="SGLang",
        cache_bytes=lambda model: None if tokens is None else tokens * size * model.cached_numbers,
        setting=f"config.kv_cache_tokens={(tokens or 0) // 2}",
        devices=config.tensor_parallel,
    )
