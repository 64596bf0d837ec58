"""The public contracts hold for the plugin: what ``g-core conformance megatron`` runs."""

from __future__ import annotations

import pytest
from gcore_megatron import conformance
from gcore_testing import PluginContract


class TestPlugin(PluginContract):
    provider = "megatron"


@pytest.mark.engine
class TestLlamaTrainer(conformance.TestLlamaTrainer):
    pass


@pytest.mark.engine
@pytest.mark.slow
class TestQwen2Trainer(conformance.TestQwen2Trainer):
    pass


@pytest.mark.engine
@pytest.mark.slow
class TestQwen3MoeTrainer(conformance.TestQwen3MoeTrainer):
    pass


@pytest.mark.engine
class TestWholeOptimizer(conformance.TestLlamaTrainer):
    """Every replica has all of AdamW's state."""

    config = {
        **conformance.OnTinyModel.config,
        "distributed_optimizer": False,
        "overlap_grad_reduce": True,
    }


@pytest.mark.engine
@pytest.mark.slow
class TestWholeTensors(conformance.TestQwen2Trainer):
    """States that every trainer loads."""

    config = {**conformance.OnTinyModel.config, "checkpoint": "whole"}
