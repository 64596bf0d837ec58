"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gcore_language.settings import GeneratorSettings, require

from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class SglangGeneratorConfig(GeneratorSettings):
    """Settings of ``roles.<generator>.config``.

    Every other argument of SGLang's server goes under ``engine:``.
    """

    tensor_parallel: int = 1
    """Devices that hold one replica together, its tensors split over them, at least 1; ``slots``
    must be a multiple of it.
    """
    kv_cache_tokens: int | None = None
    """Tokens that the key-value cache holds, above 0; empty: 16,384 on a CPU, on a GPU what SGLang
    finds free.
    """
    lora_rank: int = 0
    """Largest rank of an adapter that pushes bring alone, for which SGLang keeps room, at least 0;
    whole weights are then refused. 0: pushes bring whole weights, with a policy's adapter merged.
    """
    start_timeout_s: float = 900.0
    """Most seconds, above 0, until SGLang has started and answers: it loads the model and, on a
    GPU, captures graphs.
    """
    push_timeout_s: float = 600.0
    """Most seconds, above 0, that SGLang may take for one bucket of a weight push."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.tensor_parallel >= 1,
            "tensor_parallel",
            f"must be at least 1, is {self.tensor_parallel}",
        )
        room = self.kv_cache_tokens
        require(room is None or room > 0, "kv_cache_tokens", f"must be positive, is {room}")
        require(self.lora_rank >= 0, "lora_rank", f"must not be negative, is {self.lora_rank}")
        require(
            not (self.lora_rank and self.stop),
            "lora_rank",
            "must be 0 with stop: SGLang would miss a text that a push divides",
        )
        for name in ("start_timeout_s", "push_timeout_s"):
            require(getattr(self, name) > 0, name, f"must be positive, is {getattr(self, name)}")

    def traits(self) -> Traits:
        return replace(
            super().traits(),
            replica_slots=self.tensor_parallel,
            adapters=self.lora_rank > 0,  # else the engine has no room for one
            abort=True,
            images=True,
            midway_weights=True,
            receives_weights=True,
            scores_logprobs=True,
            # A stop of a request could be missed, as one of the settings could.
            tokens=not self.lora_rank,
        )


@dataclass(frozen=True, kw_only=True)
class DeterministicSglangGeneratorConfig(SglangGeneratorConfig):
    """Settings of ``sglang/deterministic``."""

    def traits(self) -> Traits:
        return replace(super().traits(), determinism=True)


@dataclass(frozen=True, kw_only=True)
class SleepingSglangGeneratorConfig(SglangGeneratorConfig):
    """Settings of ``sglang/sleeping``."""

    def traits(self) -> Traits:
        return replace(super().traits(), sleeps=True)
