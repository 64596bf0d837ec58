"""The public contracts hold for the plugin: what ``g-core conformance torch`` runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import PluginContract
from gcore_torch import conformance
from gcore_torch.conformance import (
    TestLlamaGenerator,
    TestLlamaTokens,
    TestLlamaTrainer,
    TestLlamaTrainerWithGenerator,
    TestQwen2Generator,
    TestQwen2Tokens,
    TestQwen2TrainerWithGenerator,
    TestQwen2VLTrainerWithGenerator,
    TestQwen3MoeGenerator,
    TestQwen3MoeTrainerWithGenerator,
)

__all__ = [
    "TestLlamaGenerator",
    "TestLlamaTokens",
    "TestLlamaTrainer",
    "TestLlamaTrainerWithGenerator",
    "TestQwen2Generator",
    "TestQwen2Tokens",
    "TestQwen2TrainerWithGenerator",
    "TestQwen2VLTrainerWithGenerator",
    "TestQwen3MoeGenerator",
    "TestQwen3MoeTrainerWithGenerator",
]


class TestQwen2Trainer(conformance.TestQwen2Trainer):
    """What several processes do does not depend on the family; those of Llama are tried always."""

    @pytest.mark.slow
    def test_ranks_meet_at_an_address(self, model: Mapping[str, Any], tmp_path: Path) -> None:
        super().test_ranks_meet_at_an_address(model, tmp_path)

    @pytest.mark.slow
    def test_two_ranks_train_as_one(self, model: Mapping[str, Any], tmp_path: Path) -> None:
        super().test_two_ranks_train_as_one(model, tmp_path)


class TestPlugin(PluginContract):
    provider = "torch"
