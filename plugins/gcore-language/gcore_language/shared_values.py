"""A critic that shares the policy's trunk: one forward pass gives log-probs and values.

The head has the form of ``gcore_language.values``: float32[1, D], without a bias. It stands beside
the policy's model, so that neither pushes nor exported models have it. The update's loss is that of
the objective, L over its weight W, and the mean of the value loss V over the trained actions:

    sum(L) / sum(W) + coefficient * sum(V) / actions

with V of an action as in ``value_loss``. A step asks for the values of all states before it begins
(the state after the last action too, which bootstraps a record that was cut off), and computes
advantages and returns of them, as where a critic of its own has given the values.

Source: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347, Eq. 9, where
policy and value function share parameters; without its entropy bonus, which is the objective's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.trainer import TrainRecord
from gcore_language import flat
from gcore_language.action_advantages import per_action
from gcore_language.cut_records import CutRecords
from gcore_language.models import new_head
from gcore_language.packing import Batch
from gcore_language.policy import Entropy, Policy
from gcore_language.shared_settings import ValueHeadSettings
from gcore_language.training import LanguageTrainer, _Prepared
from gcore_language.value_training import VALUES, explained_variance, values_of_actions
from gcore_language.values import by_record, with_end


class PolicyWithValues(Policy):
    """A policy whose last hidden states also go through a value head.

    detach: whether values have no gradient by the trunk.
    std, seed: of a new head's numbers, as in ``new_head``.
    """

    def __init__(self, model: Any, *, detach: bool, std: float, seed: int) -> None:
        super().__init__(model)
        size = int(model.config.get_text_config().hidden_size)
        self.score = nn.Linear(size, 1, bias=False)
        self.score.weight = nn.Parameter(new_head((1, size), std, seed))
        self.detach = detach

    def forward(
        self, batch: Batch, entropy: Entropy = "none", tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what ``Policy.forward`` does, and in a last column the values before the actions.

        So that is float32[A, 2 + k], k the number of tokens: one tensor, so that a sharded model
        sees all of its outputs. The hidden states are computed once.
        """
        hidden = self._states(batch)
        logp, entropies = self.logp_of(hidden, batch, entropy, tokens)
        states = hidden.detach() if self.detach else hidden
        with torch.autocast(hidden.device.type, enabled=False):
            wide = states if states.dtype == torch.float64 else states.float()
            values = flat.of_enough_rows(self.score, wide)
        return torch.cat([logp if logp.ndim == 2 else logp[:, None], values], 1), entropies

    def trial(self, batch: Batch) -> Tensor:
        """Returns what ``check_layouts`` compares: the log-probs float32[A]."""
        logp: Tensor = super().forward(batch)[0]
        return logp


def check_shared(policy: PolicyWithValues, context: WorkerContext) -> None:
    """Raises ConfigError for a model on whose trunk no value head can stand."""
    where = f"roles.{context.role}.config.value_head"
    if policy.takes_images or policy.routers is not None:
        raise ConfigError(
            "a policy with a value head takes neither images nor experts.",
            where=where,
            todo="Give the critic a model of its own: roles.critic.",
        )
    if not policy.head_apart:
        raise ConfigError(
            "this model's logits are not its output embedding of the last hidden state.",
            where=where,
            why="A value head needs that state, and one forward pass must give both.",
            todo="Give the critic a model of its own: roles.critic.",
        )


def refuse_shared(settings: ValueHeadSettings, context: WorkerContext) -> None:
    """Raises ConfigError for a value head beside a model that has one, or that nothing would train.

    ``g-core check`` knows it before; a trainer of other makers may be asked without it.
    """
    if not settings.on:
        return
    problem = ""
    if "values" in context.parts["objective"].requires:
        problem = "this role trains values alone, so its model has a value head anyway."
    elif context.parts.get("advantage") is None:
        problem = "an advantage that is one number a record needs no values."
    if problem:
        raise ConfigError(
            problem,
            where=f"roles.{context.role}.config.value_head",
            todo="Leave value_head out, or take an advantage of values, such as algorithms/gae.",
        )


def value_loss(
    values: Tensor, returns: Tensor, old: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss, unclipped loss, whether the value moved beyond the clip), each [A].

    With v the value, R the return and c the clip: 1/2 max((v - R)^2, (clip(v, old - c, old + c) -
    R)^2). The clip is that of openai/baselines ppo2. c = 0 does not clip.
    """
    plain = (values - returns) ** 2 / 2
    moved = (values - old).detach().abs() > clip
    if not clip:
        return plain, plain, torch.zeros_like(moved)
    clipped = values.clamp(min=old - clip, max=old + clip)
    return plain.maximum((clipped - returns) ** 2 / 2), plain, moved


class SharedValues(LanguageTrainer):
    """Trains a policy with its value head; a plugin's class names it before its own trainer.

    The engine's policy is a ``PolicyWithValues``: what it passes to a loss has one column more, the
    last. It has a method ``values`` beside ``logprobs``.
    """

    _now: Tensor | None = None  # values [A] of the batch whose loss is computed
    _scale = 1.0  # weight of the objective's loss for each trained action, of the update
    _explained: Mapping[str, float] = MappingProxyType({})

    @property
    def _head(self) -> ValueHeadSettings:
        settings: ValueHeadSettings = self._settings.value_head  # type: ignore[attr-defined]
        return settings

    # -- preparation -------------------------------------------------------------------------------

    def values(self, records: Sequence[TrainRecord]) -> list[np.ndarray]:
        """Returns float32[A + 1] of each record: the values before each action and after the last.

        All ranks call it at the same time; a rank may have no records.
        """
        minibatches = self._in_minibatches([with_end(record) for record in records])
        batches = [batch for minibatch in minibatches for batch in minibatch]
        values = [np.zeros(1, np.float32) for _ in records]  # of a record without actions
        given = self._engine.values(batches)  # type: ignore[attr-defined]
        for batch, own in zip(batches, given, strict=True):
            if batch is not None:
                for place, numbers in by_record(batch, own):
                    values[place] = numbers
        return values

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """Gives records their values, then does what ``LanguageTrainer.prepare`` does."""
        cut = CutRecords.of(records)
        columns = values_of_actions(cut, self.values(cut.rows))
        with_values = [
            replace(record, columns={**record.columns, **own})
            for record, own in zip(records, columns, strict=True)
        ]
        return super().prepare(with_values, scalars)

    # -- training ----------------------------------------------------------------------------------

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """Trains on the prepared records; see ``LanguageTrainer.train``.

        Further metrics: ``value_loss``, ``value_clip_share`` and ``explained_variance``, as those
        of a critic with a trunk of its own. ``loss`` is that of policy and values together.
        """
        metrics = super().train(step, advantages, minibatches, epochs)
        return {**metrics, **self._explained}

    def _give_advantages(
        self, prepared: _Prepared, numbers: np.ndarray
    ) -> np.ndarray | Sequence[np.ndarray]:
        """Adds the columns ``advantage``, ``returns`` and ``old_values``."""
        cut = prepared.cut
        ranks = self._engine.ranks
        computed = per_action(self._context.parts["advantage"], cut.given, numbers, ranks)
        of_rows = cut.cut(computed.advantages)
        self._give_by_action(prepared, "advantage", of_rows)
        self._give_by_action(prepared, "returns", cut.cut(computed.returns))
        self._give_by_action(prepared, "old_values", [r.columns[VALUES] for r in prepared.records])
        explained = explained_variance(cut.given, computed.returns, ranks)
        self._explained = {"explained_variance": explained}
        return of_rows

    def _accumulate(self, part: Sequence[Batch | None], loss: Callable[..., Tensor]) -> None:
        """Takes the values out of what the engine has computed, and then does as ever."""
        batches = [batch for batch in part if batch is not None]
        ranks = self._engine.ranks
        weight = ranks.sum_terms([self._weight(batch) for batch in batches])
        actions = ranks.sum_terms([float(batch.columns["mask"].sum()) for batch in batches])
        self._scale = weight / actions if actions else 0.0

        def without_values(
            batch: Batch, output: Tensor, entropies: Any, tokens: Tensor | None = None
        ) -> Tensor:
            if tokens is None:
                self._now = output[:, -1]
                return loss(batch, output[:, 0], entropies)
            self._now = tokens[:, -1]
            return loss(batch, output, entropies, tokens[:, :-1])

        super()._accumulate(part, without_values)

    def _loss_of(
        self, batch: Batch, current: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Returns the objective's loss_sum and metrics, and those of the values added.

        The caller divides by the objective's weight, so values are given that for each action.
        """
        loss, metrics = super()._loss_of(batch, current)
        values, self._now = self._now, None
        if values is None:  # an evaluation, which has no values
            return loss, metrics
        columns = batch.columns
        mask = columns["mask"]
        terms, plain, moved = value_loss(
            values[mask], columns["returns"][mask], columns["old_values"][mask], self._head.clip
        )
        actions = mask.sum().float()
        own = {
            "value_loss": (plain.detach().sum(), actions),
            "value_clip_share": (moved.sum().float(), actions),
        }
        return loss + self._head.coefficient * self._scale * terms.sum(), {**metrics, **own}
