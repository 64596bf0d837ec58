"""The public contracts hold for the plugin: what ``g-core conformance torch`` runs."""

from __future__ import annotations

from gcore_torch.conformance import (
    TestLlamaGenerator,
    TestLlamaTrainer,
    TestLlamaTrainerWithGenerator,
    TestQwen2Generator,
    TestQwen2Trainer,
    TestQwen2TrainerWithGenerator,
    TestQwen2VLTrainerWithGenerator,
    TestQwen3MoeGenerator,
    TestQwen3MoeTrainerWithGenerator,
)

from gcore_core.testing import PluginContract

__all__ = [
    "TestLlamaGenerator",
    "TestLlamaTrainer",
    "TestLlamaTrainerWithGenerator",
    "TestQwen2Generator",
    "TestQwen2Trainer",
    "TestQwen2TrainerWithGenerator",
    "TestQwen2VLTrainerWithGenerator",
    "TestQwen3MoeGenerator",
    "TestQwen3MoeTrainerWithGenerator",
]


class TestPlugin(PluginContract):
    provider = "torch"
