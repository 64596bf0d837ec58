"""The plugin named ``torch``: trainer, generator and scalar rewards on plain torch for Hugging Face
models.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import GeneratorProvider, RewardProvider, TrainerProvider
from gcore_torch.config import TorchGeneratorConfig, TorchRewardConfig, TorchTrainerConfig

_NEEDS = ("torch>=2.7", "transformers>=5.0", "safetensors>=0.5")


@hookimpl
def gcore_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        summary="AdamW on a Hugging Face causal language model; several slots share it by FSDP2",
        factory="gcore_torch.trainer:TorchTrainer",
        config=TorchTrainerConfig,
        capabilities=frozenset({"images", "save.background", "sharding", "weights.device"}),
        needs=_NEEDS,
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
        capabilities=frozenset(
            {"abort", "determinism", "images", "logprobs", "sleep"}
            | {"weights.device", "weights.fingerprint", "weights.push"}
        ),
        needs=_NEEDS,
    )


@hookimpl
def gcore_rewards() -> Iterable[RewardProvider]:
    yield RewardProvider(
        summary="a scalar reward model: a Hugging Face sequence classifier with one output",
        factory="gcore_torch.reward:TorchReward",
        config=TorchRewardConfig,
        needs=_NEEDS,
    )
