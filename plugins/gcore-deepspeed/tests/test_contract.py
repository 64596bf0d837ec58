"""The public contracts hold for the plugin: what ``g-core conformance deepspeed`` runs."""

from __future__ import annotations

import pytest
from gcore_deepspeed import conformance
from gcore_testing import PluginContract


class TestPlugin(PluginContract):
    provider = "deepspeed"


@pytest.mark.engine
class TestLlamaTrainer(conformance.TestLlamaTrainer):
    pass


@pytest.mark.engine
@pytest.mark.slow
class TestQwen2Trainer(conformance.TestQwen2Trainer):
    pass


@pytest.mark.engine
@pytest.mark.slow
class TestLlamaTrainerOfStage1(conformance.TestLlamaTrainer):
    """Its records are encoded flat."""

    config = {**conformance.TestLlamaTrainer.config, "stage": 1}


@pytest.mark.engine
class TestLlamaTrainerWithUniversalCheckpoints(conformance.TestLlamaTrainer):
    config = {**conformance.TestLlamaTrainer.config, "stage": 3, "checkpoint": "universal"}
    adapter_config = {**conformance.TestLlamaTrainer.adapter_config, "checkpoint": "whole"}


@pytest.mark.engine
class TestQwen2TrainerWithGenerator(conformance.TestQwen2TrainerWithGenerator):
    pass
