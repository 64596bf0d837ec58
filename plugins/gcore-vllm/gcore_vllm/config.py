"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gcore_language.settings import GeneratorSettings, require

from gcore_core.contract.traits import Traits

#: Below it vLLM takes this temperature in silence, and log-probs would be those of another one than
#: the record says.
_COLDEST = 0.01
#: The largest rank for which vLLM has buffers.
MOST_RANK = 512


@dataclass(frozen=True, kw_only=True)
class VllmGeneratorConfig(GeneratorSettings):
    """Settings of ``roles.<generator>.config``.

    Every other argument of vLLM's engine goes under ``engine:``.
    """

    tensor_parallel: int = 1
    """Devices that hold one replica together, its tensors split over them, at least 1; ``slots``
    must be a multiple of it.
    """
    kv_cache_gib: float | None = None
    """Memory of the key-value cache in GiB, above 0; empty: 1 on a CPU, on a GPU what vLLM finds
    free.
    """
    lora_path: str = ""
    """Directory of a LoRA adapter as peft saves it, for all samples; empty: none. Weight pushes
    change what lies under it.
    """
    lora_rank: int = 0
    """Largest rank of an adapter that pushes may bring alone, for which vLLM keeps room, at most
    512; 0: pushes bring whole weights, with a policy's adapter merged.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.tensor_parallel >= 1,
            "tensor_parallel",
            f"must be at least 1, is {self.tensor_parallel}",
        )
        cold = 0 < self.temperature < _COLDEST
        require(not cold, "temperature", f"must be 0 or at least {_COLDEST}, is {self.temperature}")
        room = self.kv_cache_gib
        require(room is None or room > 0, "kv_cache_gib", f"must be positive, is {room}")

        require(
            0 <= self.lora_rank <= MOST_RANK,
            "lora_rank",
            f"must be in 0..{MOST_RANK}, is {self.lora_rank}",
        )
        require(
            not (self.lora_rank and self.lora_path),
            "lora_rank",
            "must be 0 with lora_path: vLLM adds one adapter to a sample",
        )

    def traits(self) -> Traits:
        return replace(
            super().traits(),
            replica_slots=self.tensor_parallel,
            adapters=self.lora_rank > 0,  # else the engine has no room for one
            abort=True,
            device_weights=True,
            images=True,
            midway_weights=True,
            receives_weights=True,
            scores_logprobs=True,
            tokens=True,
        )


@dataclass(frozen=True, kw_only=True)
class SleepingVllmGeneratorConfig(VllmGeneratorConfig):
    """Settings of ``vllm/sleeping``."""

    def traits(self) -> Traits:
        return replace(super().traits(), sleeps=True)
