"""Policies whose actions are no tokens train by overriding ``pack``: coins, each thrown with one
learned chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.device_clock import DeviceClock
from gcore_language.progress import Progress
from gcore_language.ranks import Ranks
from gcore_language.settings import TrainerSettings
from gcore_language.training import (
    LanguageTrainer,
    Placed,
    check_objective,
    keeps_reference,
)
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.trainer import TrainRecord


@dataclass
class Throws:
    """Throws of some records. heads float32[A]: 1 or 0."""

    index: np.ndarray
    columns: dict[str, Tensor]
    heads: Tensor


class Coin:
    """An engine with one parameter, whose sigmoid is the chance of heads; plain gradient steps."""

    layouts = frozenset({"padded"})
    hidden_size = 1
    device = torch.device("cpu")

    def __init__(self, context: WorkerContext) -> None:
        self.ranks = Ranks(context, self.device)
        self.clock = DeviceClock(self.device)
        self.logit = torch.zeros((), requires_grad=True)
        self.batches: list[list[int]] = []

    def _logp(self, batch: Throws) -> Tensor:
        sign = 2 * batch.heads - 1
        return torch.nn.functional.logsigmoid(sign * self.logit)

    def logprobs(self, batches: Sequence[Any], model: str) -> list[Tensor | None]:
        with torch.no_grad():
            return [None if batch is None else self._logp(batch) for batch in batches]

    def accumulate(self, batches: Sequence[Any], loss: Any, entropy: str) -> None:
        for batch in batches:
            self.batches.append(batch.index.tolist())
            logp = self._logp(batch)
            loss(batch, logp, torch.zeros_like(logp)).backward()

    def update(self, rate: float, clip: float) -> float:
        assert self.logit.grad is not None
        norm = float(self.logit.grad.abs())
        with torch.no_grad():
            self.logit -= rate * self.logit.grad
        self.logit.grad = None
        return norm

    def close(self) -> None:
        self.ranks.close()


class CoinTrainer(LanguageTrainer):
    """At most two records to a micro-batch; a record without throws is left out."""

    def pack(self, minibatches: Sequence[Sequence[Placed]]) -> list[list[Any]]:
        kept = [[one for one in part if len(one[1].columns["heads"])] for part in minibatches]
        return [[throws(part[at : at + 2]) for at in range(0, len(part), 2)] for part in kept]


def throws(placed: Sequence[Placed]) -> Throws:
    counts = [len(record.columns["heads"]) for _, record in placed]
    heads = torch.from_numpy(np.concatenate([record.columns["heads"] for _, record in placed]))
    columns = {
        "record": torch.repeat_interleave(torch.arange(len(placed)), torch.tensor(counts)),
        "mask": torch.ones(len(heads), dtype=torch.bool),
        "rollout_logp": torch.full((len(heads),), float(np.log(0.5))),
    }
    return Throws(np.array([place for place, _ in placed]), columns, heads)


class Reinforce:
    requires: frozenset[str] = frozenset()

    def loss(self, columns: Any, current: Any) -> Any:
        return -(columns["advantage"] * current["logp"]).sum(), columns["mask"].sum(), {}

    def weight(self, columns: Any) -> Any:
        return columns["mask"].sum()


def record(sample: int, heads: list[int], minibatch: int) -> TrainRecord:
    columns = {"heads": np.array(heads, np.float32)}
    return TrainRecord(ordinal=0, sample=sample, minibatch=minibatch, columns=columns)


def test_records_reach_the_engine_in_packed_order_with_their_own_advantages() -> None:
    context = WorkerContext(role="policy", parts={"objective": Reinforce()})
    engine = Coin(context)
    trainer = CoinTrainer(TrainerSettings(learning_rate=0.5), context, engine)  # type: ignore[arg-type]
    thrown = [([1, 1], 0), ([0], 1), ([], 0), ([1], 0), ([0, 0, 1], 0), ([1], 1)]
    records = [record(sample, *told) for sample, told in enumerate(thrown)]
    trainer.prepare(records, frozenset())
    advantages = np.array([1.0, -1.0, 9.0, 2.0, -0.5, 0.25])
    metrics = trainer.train(0, advantages, 2, 1)
    assert engine.batches == [[0, 3], [4], [1, 5]]
    logit = 0.0
    for minibatch in range(2):
        part = [
            (a, h)
            for a, (heads, m) in zip(advantages, thrown, strict=True)
            if m == minibatch
            for h in heads
        ]
        chance = 1 / (1 + np.exp(-logit))
        logit += 0.5 * sum(a * (h - chance) for a, h in part) / len(part)
    assert engine.logit.item() == pytest.approx(logit, abs=1e-6)
    assert metrics["logprob_gap_max"] == pytest.approx(0, abs=1e-6)
    assert (metrics["updates"], metrics["actions"], trainer.version) == (2, 8, 1)
    trainer.close()


class Raises(Reinforce):
    def loss(self, columns: Any, current: Any) -> Any:
        return torch.stack([])


class Detached(Reinforce):
    def loss(self, columns: Any, current: Any) -> Any:
        return (columns["advantage"] * current["logp"].detach()).sum(), columns["mask"].sum(), {}


class LossAlone(Reinforce):
    def loss(self, columns: Any, current: Any) -> Any:
        return current["logp"].sum()


class PerAction(Reinforce):
    def loss(self, columns: Any, current: Any) -> Any:
        return current["logp"], columns["mask"].sum(), {}


@pytest.mark.parametrize(
    ("objective", "problem", "lines_below"),
    [
        (Raises, "raised RuntimeError: ", 1),
        (Detached, "loss() gave a loss_sum without a gradient", 0),
        (LossAlone, "loss() gave a Tensor, not (loss_sum, weight_sum, metrics)", 0),
        (PerAction, "loss() gave a loss_sum that is no 0-d tensor", 0),
    ],
)
def test_an_objective_that_breaks_its_contract_is_named_with_its_line(
    objective: type[Reinforce], problem: str, lines_below: int
) -> None:
    context = WorkerContext(role="policy", parts={"objective": objective()})
    trainer = CoinTrainer(TrainerSettings(), context, Coin(context))  # type: ignore[arg-type]
    trainer.prepare([record(0, [1, 0], 0)], frozenset())
    with pytest.raises(ContractError) as raised:
        trainer.train(0, np.array([1.0]), 1, 1)
    line = objective.loss.__code__.co_firstlineno + lines_below
    assert f"objective {objective.__name__}: {problem}" in str(raised.value)
    assert raised.value.why == f"at {__file__}:{line}"
    assert "gcore_testing.ObjectiveContract" in raised.value.todo
    trainer.close()


class Distil(Reinforce):
    """Draws the policy to a teacher; requires a column that another role gives."""

    requires = frozenset({"teacher_logp"})

    def loss(self, columns: Any, current: Any) -> Any:
        apart = current["logp"] - columns["teacher_logp"]
        return (apart * apart).sum() / 2, self.weight(columns), {}


def test_a_column_of_another_role_reaches_the_objective_action_by_action() -> None:
    """The loss and the update are those of a float64 reference of the objective."""
    context = WorkerContext(
        role="policy", parts={"objective": Distil()}, given=("teacher_logp", "unused")
    )
    check_objective(context)
    engine = Coin(context)
    trainer = CoinTrainer(TrainerSettings(learning_rate=0.5), context, engine)  # type: ignore[arg-type]
    draw = np.random.default_rng(0)
    records = []
    values = []
    for sample, heads in enumerate(([1, 1], [0], [], [0, 0, 1])):
        teacher = draw.uniform(-2, 0, len(heads)).astype(np.float32)
        made_record = record(sample, heads, 0)
        records.append(
            replace(made_record, columns={**made_record.columns, "teacher_logp": teacher})
        )
        values += list(zip(heads, teacher.astype(np.float64), strict=True))
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, np.zeros(len(records)), 1, 1)
    apart = [np.log(0.5) - teacher for _, teacher in values]
    assert metrics["loss"] == pytest.approx(np.square(apart).sum() / 2 / len(values), rel=1e-6)
    slopes = [heads - 0.5 for heads, _ in values]
    assert engine.logit.item() == pytest.approx(
        -0.5 * np.dot(apart, slopes) / len(values), rel=1e-6
    )
    trainer.close()


def test_kl_scalars_are_finite_however_much_likelier_an_action_is_to_the_reference() -> None:
    context = WorkerContext(role="policy", parts={"objective": Reinforce()}, given=("ref_logp",))
    engine = Coin(context)
    engine.logit = torch.tensor(100.0, requires_grad=True)
    trainer = CoinTrainer(TrainerSettings(), context, engine)  # type: ignore[arg-type]
    made = record(0, [0], 0)  # tails, whose log-prob is -100
    made = replace(made, columns={**made.columns, "ref_logp": np.array([-0.1], np.float32)})
    (scalars,) = trainer.prepare([made], frozenset({"kl_k1", "kl_k2", "kl_k3"}))
    assert all(np.isfinite(value) for value in scalars.values())
    assert scalars["kl_k1"] == pytest.approx(-99.9)
    assert scalars["kl_k3"] == pytest.approx(np.exp(20) - 1 - 20)
    trainer.close()


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_the_kl_to_the_rollout_is_finite_at_any_log_ratio(log_ratio: float) -> None:
    progress = Progress(step=0)
    columns = {"mask": torch.ones(1, dtype=torch.bool), "rollout_logp": torch.tensor([-log_ratio])}
    batch: Any = Throws(np.zeros(1, np.int64), columns, torch.zeros(1))
    progress.observe(torch.zeros(1), torch.zeros(1), batch, {})
    sums = {name: terms[0] for name, terms in progress.terms.items()}
    assert np.isfinite(progress.metrics(sums, 0.0)["kl"])


def test_a_column_that_no_role_gives_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires teacher_logp, which this trainer does not"):
        check_objective(WorkerContext(role="policy", parts={"objective": Distil()}))


@pytest.mark.parametrize(("given", "keeps"), [((), True), (("ref_logp",), False)])
def test_a_reference_model_is_kept_only_where_no_role_gives_its_log_probs(
    given: tuple[str, ...], keeps: bool
) -> None:
    class Referred(Reinforce):
        requires = frozenset({"ref_logp"})

    context = WorkerContext(role="policy", parts={"objective": Referred()}, given=given)
    assert keeps_reference(TrainerSettings(), context) is keeps
