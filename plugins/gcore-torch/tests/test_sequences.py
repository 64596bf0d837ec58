"""Records of several sequences: trained and scored by rows, see gcore_language.sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_algorithms.config import PpoClipConfig
from gcore_algorithms.objectives import PpoClip
from gcore_language.cut_records import CutRecords
from gcore_language.sequences import cut, rows_of
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer
from transformers import AutoModelForCausalLM

from gcore_core.contract.trainer import TrainRecord
from tests.support import language_models as tiny
from tests.support import value_ranks

#: float64 forward and backward passes that add up in another order. The model is gpt2: others turn
#: by angles that they compute in float32, where the last bit depends on the width of the batch.
EXACT = 1e-12
#: The same in float32, held against float64.
ROUNDED = 5e-6
LENGTH = 20


def record(seed: int, *, forks: bool = True, ordinal: int = 0) -> TrainRecord:
    """Makes a record of three turns, of which the last two begin sequences of their own.

    Its third sequence shares nothing with another. Without forks it is one sequence.
    """
    draw = np.random.default_rng(seed)
    mask = np.array([1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1], np.uint8)
    actions = len(mask)
    sequences = [[0, -1, 4], [3, 0, 6], [7, -1, 0]] if forks else [[0, -1, 4]]
    columns = {
        "prompt_ids": draw.integers(3, tiny.VOCABULARY, 4).astype(np.int32),
        "action_ids": draw.integers(3, tiny.VOCABULARY, actions).astype(np.int32),
        "action_mask": mask,
        "logp": np.where(mask, draw.normal(-3, 0.1, actions), 0).astype(np.float32),
        "temperature": np.array(1, np.float32),
        "text": np.zeros(actions, np.uint8),
        "sequences": np.array(sequences, np.int32),
        "turns": np.array([[0, 3, 0, 0], [5, 7, 0, 0], [9, 12, 0, 0]], np.int32),
        "episode": np.zeros(actions, np.uint8),
    }
    return TrainRecord(ordinal=ordinal, sample=0, minibatch=0, columns=columns)


def alone(one: TrainRecord) -> list[TrainRecord]:
    """Returns the rows of a record as records that know of no sequences."""
    return [replace(one, columns=columns) for columns in rows_of(one.columns)]


def without_sequences(one: TrainRecord) -> TrainRecord:
    left_out = ("sequences", "turns", "episode")
    return replace(one, columns={n: c for n, c in one.columns.items() if n not in left_out})


def objective(normalise: str = "sequence") -> PpoClip:
    length = LENGTH if normalise == "constant" else None
    return PpoClip(PpoClipConfig(normalise=normalise, constant_length=length))


@pytest.fixture
def open_trainer(model_dirs: dict[str, Path]) -> Any:
    def make(loss: Any = None, family: str = "gpt2", **config: Any) -> TorchTrainer:
        settings = {"learning_rate": 1e-3, "clip_grad_norm": 0.0, "resplit_every": 0} | config
        context = tiny.make_context(model_dirs[family], loss or objective())
        trainer = TorchTrainer(TorchTrainerConfig(**settings), context)
        if settings.setdefault("packing", "padded") == "padded":
            trainer._layouts = frozenset({"padded"})
            trainer._engine._policy.double()
        return trainer

    return make


def gradient(
    trainer: TorchTrainer,
    records: list[TrainRecord],
    advantages: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, torch.Tensor]:
    """Returns the gradient of the one update of a step."""
    found: dict[str, torch.Tensor] = {}

    def keep(*_: Any, **__: Any) -> None:
        found.update({name: p.grad.clone() for name, p in trainer._engine._tensors.items()})

    monkeypatch.setattr(trainer._engine._optimizer, "step", keep)
    trainer.prepare(records, frozenset())
    trainer.train(0, np.array(advantages), 1, 1)
    return found


def assert_equal(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], tolerance: float = EXACT
) -> None:
    assert max(float(g.abs().max()) for g in other.values()) > 1e-3
    for name in other:
        torch.testing.assert_close(
            one[name], other[name], atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_record_of_s_rows_has_the_gradient_of_s_records_of_weight_1_over_s(
    open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = record(1)
    rows = alone(whole)
    assert len(rows) == 3
    found = gradient(open_trainer(), [whole], [1.5], monkeypatch)
    # A record that is trained alone has the weight 1.
    parts = [gradient(open_trainer(), [row], [1.5], monkeypatch) for row in rows]
    assert_equal(found, {n: torch.stack([part[n] for part in parts]).mean(0) for n in found})


@pytest.mark.parametrize("layout", ["flat", "shared"])
def test_forked_records_have_one_gradient_in_every_layout(
    layout: str, open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [record(1), record(2, forks=False), record(3, ordinal=2)]
    expected = gradient(open_trainer(family="llama"), records, [1.0, -1.0, 0.5], monkeypatch)
    trainer = open_trainer(family="llama", packing="auto")
    trainer._layouts = frozenset({layout})
    found = gradient(trainer, records, [1.0, -1.0, 0.5], monkeypatch)
    assert_equal({n: g.double() for n, g in found.items()}, expected, ROUNDED)


@pytest.mark.parametrize("normalise", ["sequence", "token", "constant"])
def test_forked_and_plain_records_have_the_gradient_that_plain_torch_computes(
    normalise: str,
    open_trainer: Any,
    model_dirs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [record(1), record(2, forks=False, ordinal=1), record(3, ordinal=2)]
    advantages = [1.5, -0.5, 0.25]
    trainer = open_trainer(objective(normalise), budget_tokens=20)
    found = gradient(trainer, records, advantages, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"]).double().eval()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one, advantage in zip(records, advantages, strict=True):
        rows = alone(one)
        for row in rows:
            mask = torch.from_numpy(row.columns["action_mask"]) != 0
            logp = tiny.logp_of(model, row)[0]
            rollout = torch.from_numpy(row.columns["logp"]).double()
            ratio = (logp - rollout).exp()
            gains = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[mask]
            share = 1 / len(rows) / len(gains) if normalise == "sequence" else 1.0
            total = total - share * gains.sum()
            tokens += len(gains)
    weight = {"sequence": 3, "token": tokens, "constant": 3 * LENGTH}[normalise]
    (total / weight).backward()
    assert_equal(found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def test_nothing_is_trained_that_no_engine_sampled(open_trainer: Any) -> None:
    """The loss has no gradient by the log-prob of any given token, and so none by its logit."""
    # The ratio to the weights before the update is 1, so that nothing is clipped.
    trainer = open_trainer(PpoClip(PpoClipConfig(normalise="token", old_logprobs="recompute")))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    loss = trainer._objective.loss

    def watched(columns: Any, current: Any) -> Any:
        current["logp"].retain_grad()
        kept.append((columns["mask"], current["logp"]))
        return loss(columns, current)

    trainer._objective.loss = watched
    trainer.prepare([record(1), record(2, forks=False)], frozenset())
    trainer.train(0, np.array([1.0, -1.0]), 1, 1)
    mask = torch.cat([mask for mask, _ in kept])
    derivative = torch.cat([logp.grad for _, logp in kept])
    assert int((~mask).sum()) == 6, "two given tokens of a forked record's row are its prompt"
    assert (derivative[~mask] == 0).all()
    assert (derivative[mask] != 0).all()


def test_one_sequence_with_given_tokens_inside_is_the_same_record_masked(
    open_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = record(4, forks=False)
    found = gradient(open_trainer(), [one], [1.0], monkeypatch)
    plain = gradient(open_trainer(), [without_sequences(one)], [1.0], monkeypatch)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_records_of_one_sequence_are_not_touched() -> None:
    records = [record(1, forks=False), without_sequences(record(2, forks=False))]
    assert CutRecords.of(records).rows is records


def test_log_probs_of_the_rows_come_back_as_the_records(open_trainer: Any) -> None:
    trainer = open_trainer(PpoClip(PpoClipConfig(old_logprobs="recompute")))
    records = [record(1), record(2, forks=False, ordinal=1)]
    scored = trainer.logprobs([one.columns for one in records])
    for one, logp in zip(records, scored, strict=True):
        assert len(logp) == 12
        assert (logp[one.columns["action_mask"] == 0] == 0).all()
        rows = alone(one) if len(one.columns["sequences"]) > 1 else [without_sequences(one)]
        expected = np.concatenate(
            [
                own[row.columns["action_mask"] != 0]
                for row in rows
                for own in trainer.logprobs([row.columns])
            ]
        )
        sampled = logp[one.columns["action_mask"] != 0]
        np.testing.assert_allclose(sampled, expected, atol=1e-6)  # told in float32
    assert trainer.prepare(records, frozenset()) == [{}, {}]
    trainer.train(0, np.array([1.0, 0.5]), 1, 1)
    start = trainer.start_logprobs()
    assert len(start) == len(records)
    for own, logp in zip(start, scored, strict=True):
        np.testing.assert_allclose(own.logp, logp, atol=1e-6)
        assert own.entropy.shape == (12,)


def test_a_generator_scores_a_forked_record_as_the_trainer_does(
    open_trainer: Any, model_dirs: dict[str, Path]
) -> None:
    context = replace(tiny.make_context(model_dirs["gpt2"]), role="rollout")
    generator = TorchGenerator(TorchGeneratorConfig(max_new_tokens=4), context)
    records = [record(1), record(2, forks=False)]
    columns = [one.columns for one in records]
    for own, other in zip(
        generator.logprobs(columns), open_trainer().logprobs(columns), strict=True
    ):
        np.testing.assert_allclose(own, other, atol=1e-5)  # float32 against float64
    generator.close()


def test_scalars_of_rows_add_up_to_the_records(open_trainer: Any) -> None:
    trainer = open_trainer(reference=True, packing="auto")
    with torch.no_grad():
        for parameter in trainer._engine._policy.parameters():
            parameter.mul_(1.05)
    one = record(1)
    (whole,) = trainer.prepare([one], frozenset({"kl_k1"}))
    rows = trainer.prepare(alone(one), frozenset({"kl_k1"}))
    assert whole["kl_k1"] == pytest.approx(sum(row["kl_k1"] for row in rows), abs=1e-6)
    assert abs(whole["kl_k1"]) > 1e-3


def test_advantages_for_other_than_the_records_are_refused(open_trainer: Any) -> None:
    trainer = open_trainer()
    trainer.prepare([record(1)], frozenset())
    with pytest.raises(ValueError, match="3 advantages for 1 prepared records"):
        trainer.train(0, np.ones(3), 1, 1)


def test_values_of_a_forked_record_are_those_of_its_rows(model_dirs: dict[str, Path]) -> None:
    trainer = value_ranks.open_trainer(model_dirs["gpt2"])
    one = record(1)
    (whole,) = trainer.annotate([one])
    for row, own in zip(cut(one.columns), trainer.annotate(alone(one)), strict=True):
        for name in ("values", "next_values"):
            part = whole[name][row.begin : row.end]
            np.testing.assert_allclose(part, own[name], atol=1e-5, err_msg=name)
    assert trainer.prepare([one], frozenset()) == [{}]
    assert trainer.train(0, np.array([1.0]), 1, 1)["grad_norm"] > 0
    assert list(trainer.start_logprobs()) == [None]
