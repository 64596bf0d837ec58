"""Says how much memory a replica of vLLM will need. It imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from gcore_language.memory import of_paged_engine

from gcore_core.contract.memory import MemoryNeed, WorkerShape
from gcore_vllm.config import VllmGeneratorConfig

_GIB = 2**30
#: Of a cache whose size is not set, on a CPU, in GiB; as in ``gcore_vllm.start``.
_CPU_CACHE_GIB = 1


def generator_memory(config: VllmGeneratorConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
    """Yields what a replica needs on each device, see ``gcore_core.contract.memory``."""
    room = config.kv_cache_gib or (_CPU_CACHE_GIB if worker.device == "cpu" else None)
    devices = config.tensor_parallel
    smaller = 0.5 * (room or 0)
    yield from of_paged_engine(
        config,
        worker,
        engine="vLLM",
        # vLLM is told the bytes of each device
        cache_bytes=lambda model: None if room is None else int(room * _GIB) * devices,
        setting=f"config.kv_cache_gib={smaller:g}",
        devices=devices,
    )
