"""A critic on the policy's own trunk: see gcore_language.shared_values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_algorithms.advantages import Gae
from gcore_algorithms.config import GaeConfig
from gcore_language.lora_settings import LoraSettings
from gcore_language.shared_settings import ValueHeadSettings
from gcore_language.shared_values import value_loss
from gcore_testing.runs import run_together
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchSharedTrainer, TorchTrainer, make_trainer
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from gcore_core.contract.errors import ConfigError
from tests.support import shared_value_ranks
from tests.support.language_models import Clip, make_context, make_records
from tests.support.value_ranks import Squares

#: float64 forward and backward passes that add up in another order.
EXACT = 1e-10
COEFFICIENT, CLIP, LAM = 0.3, 0.05, 0.9


def open_trainer(
    model: Path, *, head: dict[str, Any] | None = None, **settings: Any
) -> TorchSharedTrainer:
    """Opens a trainer with this file's coefficient and clip; advantages are not whitened."""
    trainer = shared_value_ranks.open_trainer(
        model, head={"coefficient": COEFFICIENT, "clip": CLIP} | (head or {}), **settings
    )
    trainer._context.parts["advantage"] = Gae(GaeConfig(lam=LAM))
    return trainer


def gae(reward: float, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """GAE (arXiv:1506.02438, Eq. 16) with gamma 1 of one record that the policy ended, backwards
    over its trained actions; (advantages, returns).
    """
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    following, value = 0.0, 0.0
    for place in np.flatnonzero(mask)[::-1]:
        paid = reward if place == np.flatnonzero(mask)[-1] else 0.0
        following = paid + value - values[place] + LAM * following
        advantages[place], value = following, values[place]
        returns[place] = following + values[place]
    return advantages, returns


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize(("family", "packing"), [("llama", "padded"), ("gpt2", "padded")])
def test_loss_and_gradient_are_those_of_plain_torch_in_float64(
    family: str, packing: str, detach: bool, model_dirs: dict[str, Path]
) -> None:
    trainer = open_trainer(
        model_dirs[family], head={"detach": detach}, packing=packing, resplit_every=0
    )
    engine = trainer._engine
    engine._policy.double()
    gradient: dict[str, torch.Tensor] = {}

    def update(rate: float, clip: float) -> float:
        gradient.update({name: grad.clone() for name, grad in engine.gradient().items()})
        return 1.0

    engine.update = update  # type: ignore[method-assign]
    records = make_records()
    rewards = np.random.default_rng(1).standard_normal(len(records))
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, rewards, 1, 1)

    model = AutoModelForCausalLM.from_pretrained(model_dirs[family]).double().eval()
    model.get_input_embeddings().padding_idx = None
    score = engine._policy.score.weight.detach().clone().requires_grad_()
    policy_loss = value_loss = torch.zeros((), dtype=torch.float64)
    actions = 0.0
    for record, reward in zip(records, rewards, strict=True):
        columns = record.columns
        row = np.concatenate([columns["prompt_ids"], columns["action_ids"]]).astype(np.int64)
        tokens = torch.from_numpy(row)[None]
        before = slice(len(columns["prompt_ids"]) - 1, len(row) - 1)
        hidden = model.base_model(tokens).last_hidden_state[0, before]
        temperature = float(columns["temperature"])
        logits = model.lm_head(hidden) / temperature
        logp = logits.log_softmax(-1).gather(
            1, torch.from_numpy(columns["action_ids"].astype(np.int64))[:, None]
        )[:, 0]
        values = (hidden.detach() if detach else hidden) @ score[0]
        # What a step holds as columns is float32.
        old = values.detach().numpy().astype(np.float32).astype(np.float64)
        mask = columns["action_mask"] != 0
        own = [torch.from_numpy(one.astype(np.float32)) for one in gae(reward, old, mask)]
        trained = torch.from_numpy(mask)
        ratio = (logp - logp.detach()).exp()
        policy_loss = policy_loss - (ratio * own[0])[trained].sum()
        value_loss = value_loss + ((values - own[1]) ** 2 / 2)[trained].sum()
        actions += float(mask.sum())
    loss = policy_loss / actions + COEFFICIENT * value_loss / actions
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-7)  # told in float32
    assert metrics["value_loss"] == pytest.approx(float(value_loss.detach()) / actions, rel=1e-6)
    expected = {name: p.grad for name, p in model.named_parameters()} | {"score.weight": score.grad}
    assert gradient.keys() == expected.keys()
    for name, own_gradient in gradient.items():
        np.testing.assert_allclose(own_gradient, expected[name], atol=EXACT, rtol=0, err_msg=name)


def test_the_value_loss_is_half_the_larger_square_of_the_plain_and_the_clipped_value() -> None:
    draw = np.random.default_rng(0)
    values, returns, old = draw.standard_normal((3, 64))
    for clip in (0.0, 0.2, 5.0):
        expected = (values - returns) ** 2 / 2
        if clip:
            kept = np.clip(values, old - clip, old + clip)
            expected = np.maximum(expected, (kept - returns) ** 2 / 2)
        loss, plain, moved = value_loss(*map(torch.from_numpy, (values, returns, old)), clip)
        np.testing.assert_allclose(loss, expected, atol=EXACT, rtol=0)
        np.testing.assert_allclose(plain, (values - returns) ** 2 / 2, atol=EXACT, rtol=0)
        np.testing.assert_array_equal(moved, (np.abs(values - old) > clip) & (clip > 0))


def test_one_forward_pass_gives_log_probs_and_values(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = open_trainer(model_dirs["llama"], resplit_every=0)
    trainer.prepare(make_records(), frozenset())
    policy = trainer._engine._policy
    passes = []
    states = policy._states
    monkeypatch.setattr(policy, "_states", lambda batch: passes.append(1) or states(batch))
    assert trainer._prepared is not None
    batches = len(trainer._prepared.all())
    trainer.train(0, np.ones(len(make_records())), 1, 1)
    assert len(passes) == batches


def test_a_saved_trainer_goes_on_with_the_same_bits(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    trainer = open_trainer(model_dirs["qwen2"])
    shared_value_ranks.train(trainer, 0)
    trainer.save(tmp_path / "state")
    expected = shared_value_ranks.train(trainer, 1)
    again = open_trainer(model_dirs["qwen2"], value_head_std=0.1)
    again.load(tmp_path / "state")
    assert shared_value_ranks.train(again, 1) == expected
    for name, tensor in trainer._engine._tensors.items():
        assert torch.equal(tensor, again._engine._tensors[name]), name
    assert "score.weight" in trainer._engine._tensors


def test_neither_a_push_nor_an_exported_model_has_the_head(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    trainer = open_trainer(model_dirs["llama"])
    config = TorchTrainerConfig(learning_rate=3e-3)
    plain = TorchTrainer(config, make_context(model_dirs["llama"], Clip()))
    assert trainer.weight_specs() == plain.weight_specs()
    assert [spec for spec, _ in trainer.export_weights()] == plain.weight_specs()
    trainer.save_pretrained(tmp_path)
    assert "score.weight" not in load_file(tmp_path / "model.safetensors")
    architectures = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert architectures == ["LlamaForCausalLM"]
    shared_value_ranks.train(trainer, 0)
    assert trainer.diagnose_export() == []


def test_values_learn_returns(model_dirs: dict[str, Path]) -> None:
    """Of rewards that the first action says, what the values explain rises."""
    trainer = open_trainer(model_dirs["llama"], head={"coefficient": 1.0, "clip": 0.0})
    records = make_records(groups=8)
    rewards = np.array([float(r.columns["action_ids"][0] % 2) for r in records])
    explained = []
    for step in range(12):
        trainer.prepare(records, frozenset())
        explained.append(trainer.train(step, rewards, 1, 2)["explained_variance"])
    assert explained[-1] > explained[0] + 0.3, explained


def test_what_cannot_have_a_shared_head_is_refused(model_dirs: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="does not go with lora"):
        TorchTrainerConfig(value_head=ValueHeadSettings(coefficient=0.5), lora=LoraSettings(rank=2))
    with pytest.raises(ConfigError, match="must not be negative, is -0.5"):
        ValueHeadSettings(clip=-0.5)
    config = TorchTrainerConfig(value_head=ValueHeadSettings(coefficient=0.5))
    with pytest.raises(ConfigError, match="needs no values"):
        make_trainer(config, make_context(model_dirs["llama"], Clip()))
    with pytest.raises(ConfigError, match="trains values alone"):
        make_trainer(config, make_context(model_dirs["llama"], Squares()))


def run_ranks(ranks: int, packing: str, model: Path, work: Path, resume: Path) -> dict[str, Any]:
    if ranks == 1:
        numbers: dict[str, Any] = shared_value_ranks.run(0, 1, packing, model, work, resume)
        return numbers
    (work / "meet").mkdir(parents=True)
    given = [str(ranks), packing, str(model), str(work), str(resume)]
    run_together([["-m", shared_value_ranks.__name__, str(rank), *given] for rank in range(ranks)])
    told: dict[str, Any] = json.loads((work / "numbers.json").read_text())
    return told


@pytest.mark.slow
def test_one_and_two_sharded_ranks_train_alike_and_go_on_from_each_others_state(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = model_dirs["qwen2"]
    one = run_ranks(1, "auto", model, tmp_path / "1", tmp_path / "1/state")
    two = run_ranks(2, "auto", model, tmp_path / "2", tmp_path / "1/state")
    back = run_ranks(1, "auto", model, tmp_path / "back", tmp_path / "2/state")
    for name, values in one["weights"].items():
        np.testing.assert_allclose(values, two["weights"][name], atol=1e-5, err_msg=name)
    for numbers in (two, back):
        for left, right in zip(one["metrics"], numbers["metrics"], strict=True):
            assert left == pytest.approx(right, rel=1e-4, abs=1e-6)
    AutoModelForCausalLM.from_pretrained(tmp_path / "2/pretrained")


@pytest.mark.slow
def test_a_deterministic_run_has_the_same_bits_on_one_and_two_ranks(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    one, two = (
        run_ranks(
            ranks, "exact", model_dirs["qwen2"], tmp_path / str(ranks), tmp_path / f"{ranks}/state"
        )
        for ranks in (1, 2)
    )
    assert one["weights"] == two["weights"]
    assert one["metrics"] == two["metrics"]
