"""What a trainer keeps in host memory, and what it refuses to keep there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gcore_torch import gcore_check, offload
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.offload_settings import OffloadSettings
from gcore_torch.trainer import TorchTrainer
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gcore_core.contract.errors import ConfigError
from tests.support.language_models import Clip, make_advantages, make_context, make_records

ACTIVATIONS = OffloadSettings(activations=True)
STATE = OffloadSettings(state=True)
#: Shows nothing of what is chosen.
JOB: Any = SimpleNamespace(objects={}, provided={})


def test_of_a_pass_the_layers_inputs_and_the_last_norm_go_to_the_host_and_no_matrix(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    monkeypatch.setattr(
        offload, "save_on_cpu", lambda pin_memory: saved_tensors_hooks(keep, lambda tensor: tensor)
    )
    settings = TorchTrainerConfig(
        offload=ACTIVATIONS, gradient_checkpointing=True, packing="padded", resplit_every=0
    )
    trainer = TorchTrainer(settings, make_context(model_dirs["qwen2"], Clip(beta=0.0)))
    records = make_records(groups=2)
    trainer.prepare(records, frozenset())
    trainer.train(0, make_advantages(records), 1, 1)
    model = trainer._engine._policy.model
    hidden = model.config.hidden_size
    matrices = {p.untyped_storage().data_ptr() for p in model.parameters() if p.dim() > 1}
    floats = [tensor for tensor in kept if tensor.is_floating_point() and tensor.dim() == 3]
    inputs = [tensor for tensor in floats if tensor.shape[-1] == hidden]
    assert len(inputs) >= model.config.num_hidden_layers
    assert len(inputs) <= model.config.num_hidden_layers + 4  # and what the last norm keeps
    assert not matrices & {tensor.untyped_storage().data_ptr() for tensor in kept}


def test_memory_is_pinned_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offload.offload_policy(torch.device("cuda")).pin_memory
    assert not offload.offload_policy(torch.device("cpu")).pin_memory


def test_activations_without_checkpointing_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing: true"):
        TorchTrainerConfig(offload=ACTIVATIONS)
    TorchTrainerConfig(offload=ACTIVATIONS, gradient_checkpointing=True)


@pytest.mark.parametrize(
    "given", [{"run": {"deterministic": True}}, {"placement": {"sleep_in_rollout": "always"}}]
)
def test_what_does_not_go_with_a_state_on_the_host_is_refused_before_a_start(
    given: dict[str, Any],
) -> None:
    def plan(state: bool) -> dict[str, Any]:
        role = {"use": "torch", "config": {"offload": {"state": state}}}
        return {"roles": {"policy": role}, **given}

    (problem,) = gcore_check(plan(True), JOB)
    assert problem.startswith("roles.policy.config.offload.state: ")
    assert list(gcore_check(plan(False), JOB)) == []


def test_exact_sums_on_the_host_are_refused(model_dirs: dict[str, Path]) -> None:
    context = make_context(model_dirs["qwen2"], Clip(beta=0.0), deterministic=True)
    with pytest.raises(ConfigError, match="does not go with a deterministic run"):
        TorchTrainer(TorchTrainerConfig(offload=STATE), context)
    offload.refuse_exact_sums(ACTIVATIONS, context)


def test_a_model_whose_head_is_not_apart_keeps_its_activations(model_dirs: dict[str, Path]) -> None:
    trainer = TorchTrainer(TorchTrainerConfig(), make_context(model_dirs["qwen2"], Clip(beta=0.0)))
    policy = trainer._engine._policy
    offload.check_head(policy, "policy")
    policy.head_apart = False
    with pytest.raises(ConfigError, match="more than the output embedding"):
        offload.check_head(policy, "policy")
