"""The plugin named ``deepspeed``: a trainer on DeepSpeed's ZeRO for any Hugging Face causal
language model.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import TrainerProvider, VenvProvider
from gcore_deepspeed.config import DeepSpeedTrainerConfig


@hookimpl
def gcore_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        summary="DeepSpeed: AdamW with ZeRO 1, 2 or 3 on a Hugging Face causal language model",
        factory="gcore_deepspeed.trainer:DeepSpeedTrainer",
        config=DeepSpeedTrainerConfig,
        capabilities=frozenset(
            {"evaluate", "logprobs", "logprobs.compared", "objective.adapts", "sharding"}
        ),
        needs=("deepspeed>=0.19.8,<0.20", "torch>=2.7", "transformers>=5.0"),
    )


@hookimpl
def gcore_venvs() -> Iterable[VenvProvider]:
    beside = ("gcore-algorithms",)  # objectives run in the trainer
    yield VenvProvider(
        name="cpu",
        summary="DeepSpeed for machines without CUDA",
        engine="deepspeed",
        requirements="gcore_deepspeed:cpu.txt",
        beside=beside,
    )
    yield VenvProvider(
        name="cuda",
        summary="DeepSpeed for CUDA",
        engine="deepspeed",
        extras=("engine",),
        beside=beside,
    )
