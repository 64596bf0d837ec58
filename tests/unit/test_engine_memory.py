"""What the other engines say of their memory: each shares out what its settings say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_deepspeed.config import DeepSpeedTrainerConfig
from gcore_deepspeed.memory import trainer_memory as of_deepspeed
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.memory import trainer_memory as of_megatron
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.memory import generator_memory as of_sglang
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.memory import generator_memory as of_vllm

from gcore_core.contract.memory import MemoryNeed, WorkerShape
from tests.support.known_models import KNOWN

MODEL = next(model for model in KNOWN if model.name == "Llama-3.1-8B")


@pytest.fixture
def worker(tmp_path: Path) -> WorkerShape:
    (tmp_path / "config.json").write_text(json.dumps(MODEL.config))
    return WorkerShape(role="any", device="cuda", slots=8, model={"path": str(tmp_path)})


def found(needs: list[MemoryNeed], what: str, phase: str = "training") -> MemoryNeed:
    return next(need for need in needs if (need.what, need.phase) == (what, phase))


@pytest.mark.parametrize(("stage", "weights", "gradients"), [(1, 1, 1), (2, 1, 8), (3, 8, 8)])
def test_a_stage_of_zero_shares_out_what_it_is_for(
    worker: WorkerShape, stage: int, weights: int, gradients: int
) -> None:
    needs = list(of_deepspeed(DeepSpeedTrainerConfig(stage=stage), worker))
    total = MODEL.parameters
    assert found(needs, "weights").nbytes == 4 * total // weights
    assert found(needs, "gradients").nbytes == 4 * total // gradients
    assert found(needs, "optimizer").nbytes == 12 * total // 8


def test_an_offloaded_optimizer_lies_in_the_memory_of_the_host(worker: WorkerShape) -> None:
    needs = list(of_deepspeed(DeepSpeedTrainerConfig(offload_optimizer=True), worker))
    assert found(needs, "optimizer").on == "host"
    assert found(needs, "weights").on == "device"


@pytest.mark.parametrize("settings", [{"tensor_parallel": 8}, {"pipeline_parallel": 8}])
def test_megatrons_slots_hold_the_model_together(
    worker: WorkerShape, settings: dict[str, Any]
) -> None:
    config = MegatronTrainerConfig(dtype="bfloat16", **settings)
    own = found(list(of_megatron(config, worker)), "weights").nbytes
    assert own is not None
    # norms are whole on each slot; an end of a pipeline has an embedding and its layers
    embedding = MODEL.config["vocab_size"] * MODEL.config["hidden_size"]
    assert 2 * MODEL.parameters / 8 <= own <= 2 * (MODEL.parameters / 8 + embedding)


def test_a_cache_that_takes_what_is_free_is_unknown_and_one_that_is_set_is_counted(
    worker: WorkerShape,
) -> None:
    free = list(of_vllm(VllmGeneratorConfig(), worker))
    assert found(free, "key-value cache", "rollout").nbytes is None
    given = list(of_vllm(VllmGeneratorConfig(kv_cache_gib=4, tensor_parallel=2), worker))
    assert found(given, "key-value cache", "rollout").nbytes == 4 * 2**30
    tokens = list(of_sglang(SglangGeneratorConfig(kv_cache_tokens=1000), worker))
    # 32 layers, 8 heads of 128, keys and values, float32
    assert found(tokens, "key-value cache", "rollout").nbytes == 1000 * 32 * 8 * 128 * 2 * 4


def test_a_tensor_parallel_replica_holds_its_part_of_the_matrices(worker: WorkerShape) -> None:
    config = VllmGeneratorConfig(dtype="bfloat16", tensor_parallel=4)
    weights = found(list(of_vllm(config, worker)), "weights", "rollout").nbytes
    assert weights == pytest.approx(2 * MODEL.parameters / 4, rel=1e-3)
