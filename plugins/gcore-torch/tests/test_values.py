"""A value head on a causal model: see gcore_language.values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.lora_settings import LoraSettings
from gcore_language.models import load_reward_model, load_value_model
from gcore_testing.runs import run_together
from transformers import AutoModelForSequenceClassification

from gcore_core.contract.errors import ConfigError, ContractError, DataError
from gcore_core.contract.trainer import TrainRecord
from tests.support import value_ranks
from tests.support.language_models import make_records
from tests.support.value_ranks import AtTheEnd, Squares, open_trainer, weights_of

pytestmark = pytest.mark.rest

#: float32 kernels that add up in another order, in values of up to 8: ten units in the last place.
ROUNDING = 1e-5
LAYOUTS = [("qwen2", "auto"), ("llama", "shared_prompt"), ("qwen3", "padded"), ("gpt2", "auto")]


def values_of(model: Any, record: TrainRecord) -> torch.Tensor:
    """Returns float32[A + 1] by transformers' own model, of one row without padding."""
    columns = record.columns
    row = np.concatenate([columns["prompt_ids"], columns["action_ids"]]).astype(np.int64)
    hidden = model.base_model(torch.from_numpy(row)[None]).last_hidden_state
    values: torch.Tensor = model.score(hidden)[0, len(columns["prompt_ids"]) - 1 :, 0]
    return values


@pytest.mark.parametrize(("family", "packing"), LAYOUTS)
def test_values_before_each_action_and_after_the_last_are_transformers_own(
    family: str, packing: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    trainer = open_trainer(model_dirs[family], settings={"packing": packing})
    trainer.save_pretrained(tmp_path)
    model = load_reward_model(str(tmp_path), dtype="float32")
    records = make_records()
    given = trainer.values(records)
    for record, values in zip(records, given, strict=True):
        assert values.dtype == np.float32
        expected = values_of(model, record).detach()
        assert float(expected.abs().max()) > 0.1
        np.testing.assert_allclose(values, expected, atol=ROUNDING)
        row = np.concatenate([record.columns["prompt_ids"], record.columns["action_ids"]])
        after_the_last = model(torch.from_numpy(row.astype(np.int64))[None]).logits[0, 0]
        if row[-1] != model.config.pad_token_id:  # there transformers looks for another last token
            assert values[-1] == pytest.approx(after_the_last.item(), abs=ROUNDING)


def test_a_record_without_actions_has_the_value_of_its_prompts_end(
    model_dirs: dict[str, Path],
) -> None:
    trainer = open_trainer(model_dirs["llama"])
    full = make_records(groups=1, samples=1)[0]
    empty = {**full.columns, "action_ids": full.columns["action_ids"][:0]}
    empty |= {name: full.columns[name][:0] for name in ("action_mask", "logp")}
    record = TrainRecord(ordinal=0, sample=1, minibatch=0, columns=empty)
    (of_full, of_empty) = trainer.values([full, record])
    np.testing.assert_allclose(of_empty, of_full[:1], atol=ROUNDING)
    assert len(of_full) == len(full.columns["action_ids"]) + 1


@pytest.mark.parametrize("objective", [Squares(), AtTheEnd()])
@pytest.mark.parametrize(("family", "packing"), LAYOUTS)
def test_one_update_of_values_matches_plain_torch(
    objective: Any, family: str, packing: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"packing": packing, "eps": 1e-2, "clip_grad_norm": 0.0, "learning_rate": 2e-3}
    trainer = open_trainer(model_dirs[family], objective, settings=settings)
    trainer.save_pretrained(tmp_path)
    records = make_records()
    numbers = np.random.default_rng(1).standard_normal(len(records))
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, numbers, 1, 1)

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    model.get_input_embeddings().padding_idx = None
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, (0.9, 0.95), 1e-2, 0.0)
    loss, weight = torch.zeros(()), 0.0
    for record, number in zip(records, numbers, strict=True):
        mask = torch.from_numpy(np.append(record.columns["action_mask"], 0)).float()
        if isinstance(objective, AtTheEnd):
            mask = torch.nn.functional.one_hot(torch.tensor(len(mask) - 1), len(mask)).float()
        loss = loss + ((values_of(model, record) - float(number)) ** 2 * mask).sum() / 2
        weight += float(mask.sum())
    (loss / weight).backward()
    optimizer.step()
    assert metrics["loss"] == pytest.approx(float(loss.detach()) / weight, rel=1e-5)
    assert metrics.keys() >= {"grad_norm", "learning_rate", "updates"}
    assert "entropy" not in metrics  # nothing of a policy is said of values
    expected = dict(model.named_parameters())
    assert weights_of(trainer).keys() == expected.keys()
    for name, values in weights_of(trainer).items():
        np.testing.assert_allclose(values, expected[name].detach().flatten(), atol=1e-6)


def test_a_new_head_is_zero_or_normal_by_seed_and_the_trunk_is_the_models(
    model_dirs: dict[str, Path],
) -> None:
    def head(std: float, seed: int) -> torch.Tensor:
        weight: torch.Tensor = load_value_model(path, std=std, seed=seed).score.weight.detach()
        return weight

    path = str(model_dirs["qwen2"])
    assert not head(0.0, 3).any()
    assert torch.equal(head(0.5, 3), head(0.5, 3))
    assert not torch.equal(head(0.5, 3), head(0.5, 4))
    assert float(head(0.5, 3).std()) == pytest.approx(0.5, rel=0.2)
    trainer = open_trainer(model_dirs["qwen2"], settings={"value_head_std": 0.0})
    assert set(trainer._engine.layouts) == {"flat", "shared", "padded"}  # tried by hidden states
    assert all(not own.any() for own in trainer.values(make_records()))


def test_a_head_that_the_model_has_is_kept(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    open_trainer(model_dirs["llama"]).save_pretrained(tmp_path)
    again = open_trainer(tmp_path, settings={"value_head_std": 0.0})
    first = open_trainer(model_dirs["llama"])
    assert weights_of(again) == weights_of(first)


def test_models_that_cannot_have_a_value_head_are_refused(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(model_dirs["llama"], num_labels=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="has 3 outputs; a value head has one"):
        load_value_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no log-probs to compare with a reference's"):
        open_trainer(model_dirs["llama"], settings={"reference": True})
    trainer = open_trainer(model_dirs["llama"])
    with pytest.raises(ConfigError, match="a model with a value head takes no adapters"):
        open_trainer(model_dirs["llama"], settings={"lora": LoraSettings(rank=2)})
    with pytest.raises(ConfigError, match="a value head computes no kl_k1"):
        trainer.prepare(make_records(), frozenset({"kl_k1"}))
    with pytest.raises(ContractError, match="gives no log-probs"):
        trainer.logprobs([])


def run_ranks(ranks: int, packing: str, model: Path, work: Path, resume: Path) -> dict[str, Any]:
    if ranks == 1:
        return value_ranks.run(0, 1, packing, model, work, resume)
    (work / "meet").mkdir(parents=True)
    given = [str(ranks), packing, str(model), str(work), str(resume)]
    run_together([["-m", value_ranks.__name__, str(rank), *given] for rank in range(ranks)])
    numbers: dict[str, Any] = json.loads((work / "numbers.json").read_text())
    return numbers


def assert_ranks_agree(counts: tuple[int, ...], model: Path, work: Path) -> None:
    one = run_ranks(1, "auto", model, work / "1", work / "1/state")
    for ranks in counts:
        # each goes on from what the other number of ranks has saved
        many = run_ranks(ranks, "auto", model, work / str(ranks), work / "1/state")
        for name, values in one["weights"].items():
            np.testing.assert_allclose(values, many["weights"][name], atol=1e-5, err_msg=name)
        back = run_ranks(1, "auto", model, work / f"back{ranks}", work / str(ranks) / "state")
        for numbers in (many, back):
            for left, right in zip(one["metrics"], numbers["metrics"], strict=True):
                assert left == pytest.approx(right, rel=1e-4, abs=1e-6)
        load_reward_model(str(work / str(ranks) / "pretrained"), dtype="float32")


def test_values_train_alike_on_one_and_two_sharded_ranks(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    assert_ranks_agree((2,), model_dirs["qwen2"], tmp_path)


@pytest.mark.slow
def test_values_train_alike_on_four_sharded_ranks(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    assert_ranks_agree((4,), model_dirs["qwen2"], tmp_path)


@pytest.mark.slow
def test_a_deterministic_run_has_the_same_bits_of_values_on_one_and_two_ranks(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = model_dirs["qwen2"]
    one, two = (
        run_ranks(ranks, "exact", model, tmp_path / str(ranks), tmp_path / str(ranks) / "state")
        for ranks in (1, 2)
    )
    assert one["weights"] == two["weights"]
    assert one["metrics"] == two["metrics"]
    assert one["values"][: len(two["values"])] == two["values"]
