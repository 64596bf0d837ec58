"""What the other engines say of their memory: each shares out what its settings say."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gcore_deepspeed.config import DeepSpeedTrainerConfig
from gcore_deepspeed.memory import trainer_memory as of_deepspeed
from gcore_language.architecture import architecture_of
from gcore_language.memory import push_buckets
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.memory import trainer_memory as of_megatron
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.memory import generator_memory as of_sglang
from gcore_testing import fake
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.memory import trainer_memory as of_torch
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.memory import generator_memory as of_vllm

from gcore_core.contract.memory import ASLEEP, PUSH_BYTES, MemoryNeed, WorkerShape
from gcore_core.contract.records import TensorSpec
from gcore_core.runtime.compute import DirectCompute
from gcore_core.runtime.messages import BeginPush
from gcore_core.workers.push import PushMemory, PushSource
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


class Large(fake.FakeTrainer):
    """Has the tensors of a model, and none of their content."""

    def __init__(self, config: dict[str, Any]) -> None:
        model = architecture_of(config)
        tensors = [*model.root(), *(one for layer in model.all_layers() for one in layer)]
        shapes = [one.shape for one in tensors for _ in range(one.count)]
        self._specs = [
            TensorSpec(f"t{i}", "BF16", s, 2 * math.prod(s)) for i, s in enumerate(shapes)
        ]

    def weight_specs(self) -> list[TensorSpec]:
        return self._specs


@pytest.mark.parametrize(
    ("layers", "words", "push_bytes", "note"),
    [
        (1, 1000, 8 << 30, "all weights"),
        (4, 32000, PUSH_BYTES, "push_bucket_bytes"),
        (4, 32000, 300 << 20, "push_bucket_bytes"),
        (4, 128256, PUSH_BYTES, "the largest tensor"),
    ],
)
def test_what_a_push_goes_through_is_what_is_foreseen_of_it(
    layers: int,
    words: int,
    push_bytes: int,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is not allocated here, so that its file takes no room."""

    def sized(handle: int, offset: int, nbytes: int) -> None:
        os.truncate(handle, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", sized)
    config = {**MODEL.config, "num_hidden_layers": layers, "vocab_size": words}
    memory = PushMemory(tmp_path / "push")
    request = BeginPush(version=1, bucket_bytes=push_bytes, receivers=1)
    PushSource(Large(config), memory, DirectCompute(), request)
    need = push_buckets(architecture_of(config), "bfloat16", push_bytes)
    assert need.nbytes == (tmp_path / "push").stat().st_size
    assert need.note.startswith("shared memory") and note in need.note


def test_every_trainer_counts_what_a_push_goes_through(worker: WorkerShape) -> None:
    """Its tensors take less than the memory of a push."""
    asked = replace(worker, push_bytes=3 << 30)
    for needs in (
        of_deepspeed(DeepSpeedTrainerConfig(), asked),
        of_megatron(MegatronTrainerConfig(), asked),
        of_torch(TorchTrainerConfig(), asked),
    ):
        assert found(list(needs), "push buckets", "push").nbytes == 3 << 30


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


@pytest.mark.parametrize(("spread", "tensor"), [(1, 1), (4, 1), (8, 1), (4, 4)])
def test_megatrons_slots_hold_their_own_experts_whole(
    worker: WorkerShape, spread: int, tensor: int
) -> None:
    """Eight slots: those of a replica split the rest, and others hold the same experts."""
    mixtral = next(model for model in KNOWN if model.name == "Mixtral-8x7B")
    settings = MegatronTrainerConfig(
        dtype="bfloat16",
        expert_parallel=spread,
        tensor_parallel=tensor,
        sequence_parallel=tensor > 1,
    )
    (Path(worker.model["path"]) / "config.json").write_text(json.dumps(mixtral.config))
    needs = list(of_megatron(settings, worker))
    of_layer = 3 * mixtral.config["hidden_size"] * mixtral.config["intermediate_size"]
    experts = mixtral.config["num_hidden_layers"] * mixtral.config["num_local_experts"] * of_layer
    dense = (mixtral.parameters - experts) / tensor
    # norms and routers are whole
    assert found(needs, "weights").nbytes == pytest.approx(2 * (dense + experts / spread), rel=1e-3)
    replicas, alike = 8 // tensor, 8 // spread
    optimizer = 12 * (dense / replicas + experts / spread / alike)
    assert found(needs, "optimizer").nbytes == pytest.approx(optimizer, rel=1e-3)
    sent = [need for need in needs if need.what == "tokens under way"]
    assert bool(sent) == (spread > 1)


@pytest.mark.parametrize(("offload", "place"), [(False, "device"), (True, "host")])
def test_a_reference_of_deepspeed_lies_where_the_weights_do(
    offload: bool, place: str, worker: WorkerShape
) -> None:
    config = DeepSpeedTrainerConfig(reference=True, stage=3, offload_params=offload)
    needs = list(of_deepspeed(config, worker))
    assert found(needs, "reference").on == found(needs, "weights").on == place


def test_megatrons_reference_waits_in_the_memory_of_the_host(worker: WorkerShape) -> None:
    needs = list(of_megatron(MegatronTrainerConfig(reference=True), worker))
    assert found(needs, "reference").on == "host"
    assert found(needs, "reference").nbytes == found(needs, "weights").nbytes
    assert found(needs, "weights").on == "device"


@pytest.mark.parametrize(
    "needs_of",
    [
        lambda worker: of_deepspeed(DeepSpeedTrainerConfig(stage=2), worker),
        lambda worker: of_deepspeed(DeepSpeedTrainerConfig(stage=3, offload_params=True), worker),
        lambda worker: of_megatron(MegatronTrainerConfig(dtype="bfloat16"), worker),
    ],
    ids=["deepspeed", "deepspeed, offloaded", "megatron"],
)
def test_a_trainer_that_sleeps_keeps_all_but_gradients_on_the_host_and_on_a_cpu_nothing(
    worker: WorkerShape, needs_of: Any
) -> None:
    worker = replace(worker, requires=frozenset({"ref_logp"}))
    needs = list(needs_of(worker))
    kept = [found(needs, what).nbytes or 0 for what in ("weights", "optimizer", "reference")]
    asleep = found(needs, "state", ASLEEP)
    assert (asleep.on, asleep.nbytes) == ("host", sum(kept))
    on_cpu = list(needs_of(replace(worker, device="cpu")))
    assert found(on_cpu, "state", ASLEEP).nbytes == 0


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
    split: dict[str, Any] = {"dtype": "bfloat16", "tensor_parallel": 4}
    of_both = [
        list(of_vllm(VllmGeneratorConfig(**split), worker)),
        list(of_sglang(SglangGeneratorConfig(kv_cache_tokens=1000, **split), worker)),
    ]
    for needs in of_both:
        weights = found(needs, "weights", "rollout").nbytes
        assert weights == pytest.approx(2 * MODEL.parameters / 4, rel=1e-3)
    # each has 2 of the 8 key-value heads
    cache = found(of_both[1], "key-value cache", "rollout").nbytes
    assert cache == 1000 * 32 * 2 * 128 * 2 * 2
