"""Defines what the core calls on losses, advantages, filters and balancers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor

#: A log-ratio of probabilities is clamped to this on both sides before it is exponentiated, in
#: nats. exp(20) is 4.9e8. Unclamped, float32 overflows at 88.7, and infinity times an advantage or
#: a weight of 0 is NaN.
LOG_RATIO_LIMIT = 20.0

#: With this begins the name of an output that an objective may require: the log-probs of the tokens
#: that a column names, such as "logp@teacher_topk_ids".
LOGP_OF = "logp@"

#: How many units in the last place numbers may differ and still count as equal.
_ROUNDING_ULPS = 8


def ids_column(required: str) -> str:
    """Returns the column that names the tokens of an output "logp@COLUMN"; "" for other names."""
    return required.removeprefix(LOGP_OF) if required.startswith(LOGP_OF) else ""


def is_rounding(difference: float, magnitude: float) -> bool:
    """Whether a difference of float64 numbers of this magnitude is no more than rounding noise.

    It is when it is at most 8 units in the last place of the magnitude: the same rewards, weighted
    and added up in another order, differ by that much.
    """
    return abs(difference) <= _ROUNDING_ULPS * math.ulp(magnitude)


def are_equal(values: np.ndarray) -> bool:
    """Whether the numbers, float64[N], are all equal, but for rounding noise; True where N is 0.

    Advantages and filters take the rewards of a group for equal by this, since to divide noise by
    its own standard deviation makes numbers of size 1 of it.
    """
    if not values.size:
        return True
    return is_rounding(float(np.ptp(values)), float(np.abs(values).max()))


@runtime_checkable
class Objective(Protocol):
    """Computes the loss of one micro-batch, as sums that add up over micro-batches and ranks.

    The actions of all its records lie flat, so padding cannot matter. A is the number of actions, R
    of records; tensors are on the trainer's device.

    ``columns`` always has:
        record int64[A]: the record of each action, 0..R-1
        mask bool[A]: whether the action is trained on
        advantage float32[A]: a record's scalar repeated, or one per action
        rollout_logp float32[A]: log-prob under the weights that sampled the action
    and what ``requires`` names; a column that is not required may be absent:
        old_logp float32[A]: log-prob under the weights before this step's first update
        ref_logp float32[A]: log-prob under the reference
        age int64[A]: how many versions older the weights that sampled the action are than those
            that the step begins with; 0 for an action that nobody sampled
        any column of a role: float32 or int64, [A] or [A, k]
        group int64[A]: the group of each action, 0..G-1. An objective that requires it gets whole
            groups: all records of a prompt are in one micro-batch, on one rank
        sample int64[A]: number of the action's record in its group, as in ``Header.sample``
    and, where a record has several sequences (column ``sequences``), of which each is a row with a
    number of its own in ``record``:
        rows int64[A]: how many rows the action's record has, by which a mean over records divides
    ``current`` has, each with a gradient:
        logp float32[A]: log-prob under the weights that are being trained
        entropy float32[A]: only if required
        logp@COLUMN float32[A, k]: only if required; the log-probs, at the place of each action and
            at its record's temperature, of the k tokens that the role's column COLUMN names

    An objective that requires "values" trains a model with a value head (``Traits.value_head``).
    What lies flat is then not actions but states, S = A + R of them: of each record the state
    before each action, in order, and then the state after the last one. ``columns`` always has:
        record int64[S]: the record of each state, 0..R-1
        mask bool[S]: whether the action after the state is trained on; false at a record's last
            state, which no action follows
        end bool[S]: whether the state is its record's last
        advantage float32[S]: the record's scalar repeated
    and what ``requires`` names:
        old_values float32[S]: values under the weights before this step's first update
        returns float32[S]: what an ``ActionAdvantage`` gives, 0 where mask is false
    ``current`` has, with a gradient, only:
        values float32[S]: values under the weights that are being trained

    requires: names of columns, and "entropy", "values" or "logp@COLUMN", without which ``loss``
        cannot work. A trainer with the trait ``token_logprobs`` gives the last.
    """

    requires: frozenset[str]

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Returns (loss_sum, weight_sum, metrics) of one micro-batch.

        The gradient of an update is that of sum(loss_sum) / sum(weight_sum) over all its
        micro-batches and all ranks.

        loss_sum: 0-d, with a gradient.
        weight_sum: 0-d, what ``weight`` gives.
        metrics: name -> (sum, weight), both 0-d and detached, added up the same way.
        """

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the weight_sum that ``loss`` will give, 0-d, before there are new log-probs.

        A trainer calls it first, so that it can divide each micro-batch's loss by the whole
        update's weight. It may read record, rows, mask, advantage and rollout_logp, and group and
        sample where they are required; it depends on masks and lengths alone.
        """


@runtime_checkable
class MakesAdvantages(Protocol):
    """Says by which advantages an objective's loss goes, where it has others than the column's.

    No trait: a trainer asks an objective that has the method, where it checks that the loss
    raises the log-probs of actions whose advantage is positive.
    """

    def advantages(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns float32[A], such as the column's and a teacher's together; without gradient."""


@runtime_checkable
class AdaptsToSteps(Protocol):
    """Lets an objective change its loss by what a step has measured.

    A trainer without the trait ``adapts_objective`` refuses to train it, unless ``state`` is empty
    before the first step: then the objective stays as it is under its settings.

    Every rank has an objective of its own. All are shown the same numbers, so all have the same
    state. ``loss`` and ``weight`` do not change it.
    """

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Learns from a step's metrics, after the step's last update.

        metrics: those that ``Trainer.train`` returns, reduced over ranks; without ``busy_s``.
        """

    def state(self) -> dict[str, Any]:
        """Returns what was learned, as plain values that survive JSON.

        Those are finite numbers, texts, lists, and dicts with texts as keys. It is a part of the
        trainer's checkpoint.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state`` of an earlier objective of this class returned."""


@dataclass(frozen=True, kw_only=True)
class GroupScalars:
    """Holds the S records of one prompt, in numbers.

    rewards: float64[S], the weighted sum of the named rewards.
    lengths: int64[S], how many actions.
    scalars: name -> float64[S], of those that the advantage's ``requires`` names.
    named: reward -> float64[S], each reward by itself: normalised as its settings say, without its
        weight. NaN for a record that does not have it, because it was skipped.
    weights: reward -> its weight, for each of ``named``.
    """

    rewards: np.ndarray
    lengths: np.ndarray
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)
    named: Mapping[str, np.ndarray] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Advantage(Protocol):
    """Turns the rewards of groups into one number per record (level "record"). It is pure.

    group_size: samples that are drawn of each prompt.
    requires: scalars of a record that it needs ("kl_k1", ...), which trainers compute.
    """

    group_size: int
    requires: frozenset[str]

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        """Returns what other shards' groups need of this shard's, float64[K].

        It is summed over the shards. K is 0 where groups need nothing of each other.
        """

    def of(
        self,
        groups: Sequence[GroupScalars],
        statistics: np.ndarray,
    ) -> list[np.ndarray]:
        """Returns for each group the advantages of its records, float64[S].

        statistics: float64[K], the sum over all shards of what ``statistics`` returned.
        """


@dataclass(frozen=True, kw_only=True)
class ActionScalars:
    """Holds one record of A actions, in numbers.

    reward: the weighted sum of its named rewards.
    mask: bool[A], whether the action is trained on.
    truncated: whether it was cut before the policy ended it, so that more actions could follow.
    columns: name -> float64[A], of those that the advantage's ``requires`` names, and ``logp``, the
        log-probs of the actions under the weights that sampled them.
    """

    reward: float
    mask: np.ndarray
    truncated: bool = False
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)


@runtime_checkable
class ActionAdvantage(Protocol):
    """Turns a record's reward and columns into one number per action (level "action").

    It is pure, and made in controllers, for its ``group_size``, and on every trainer rank. All
    roles that train compute the same of a record.

    group_size: samples that are drawn of each prompt.
    requires: per-action columns that it needs, which roles give ("values", "ref_logp", ...).
    """

    group_size: int
    requires: frozenset[str]

    def per_action(self, record: ActionScalars) -> tuple[np.ndarray, np.ndarray]:
        """Returns (advantages, returns) of one record, float64[A] each, 0 where ``mask`` is false.

        returns: what the values before the actions should have been.
        """

    def statistics(self, advantages: np.ndarray) -> np.ndarray:
        """Returns what other records' advantages need of a record's, float64[K].

        It is summed over all records of a step, on all ranks. K is the same for all of them, and 0
        where records need nothing of each other.

        advantages: float64[n], of the record's trained actions.
        """

    def of(self, advantages: np.ndarray, statistics: np.ndarray) -> np.ndarray:
        """Returns the advantages of a record's trained actions as the policy gets them, float64[n].

        advantages: float64[n], of ``per_action``.
        statistics: float64[K], summed over all records of the step.
        """


@runtime_checkable
class Filter(Protocol):
    """Says which groups teach; others are drawn in place of the rest."""

    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        """Returns (True, "") for a group that teaches, else (False, a word for why not)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Holds what a balancer may know of N records that are to be trained on.

    group: int64[N], equal for records of one prompt, which are neighbours.
    prompt, actions: int64[N], how many tokens, or denoising steps.
    extra: float64[N], what a record costs besides, in tokens' worth: ``Finished.cost``. It is
        finite and not negative; else making the object raises ContractError.
    """

    group: np.ndarray
    prompt: np.ndarray
    actions: np.ndarray
    extra: np.ndarray

    def __post_init__(self) -> None:
        if not ((self.extra >= 0) & np.isfinite(self.extra)).all():
            raise ContractError("the cost of a record is negative or not finite", where="balance")

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def lengths(self) -> np.ndarray:
        """The prompt and actions of each record, int64[N]."""
        return np.asarray(self.prompt + self.actions)

    def take(self, indexes: np.ndarray | Sequence[int]) -> Work:
        """Returns the records at these indexes, in that order."""
        at = np.asarray(indexes, np.int64)
        return Work(
            group=self.group[at],
            prompt=self.prompt[at],
            actions=self.actions[at],
            extra=self.extra[at],
        )


@runtime_checkable
class Balancer(Protocol):
    """Decides which records train on which data-parallel rank.

    Both methods are pure and deterministic.
    """

    def costs(self, work: Work) -> np.ndarray:
        """Predicts how long each record will take, in any unit: float64[N].

        Costs are finite and not negative.
        """

    def split(self, work: Work, bins: int) -> list[list[int]]:
        """Returns for each bin the indexes of its records.

        Every record is in exactly one bin. A bin may stay empty.
        """


@runtime_checkable
class LearnsCosts(Protocol):
    """Learns costs from measured times: trait ``learns_costs`` of a balancer."""

    def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
        """Learns from the times of a step.

        It is not called in a run that is to repeat bit for bit. Returns the R2 of what it would
        have predicted of the latest steps, each before it saw that step; None while there is
        nothing to say.

        loads: for each data-parallel rank, the records that it trained on.
        seconds: float64[ranks], how long each rank worked; finite and positive.
        """


@runtime_checkable
class KeepsCosts(Protocol):
    """Lets a resumed run go on with what a balancer has learned.

    A balancer with the trait ``learns_costs`` may do without.
    """

    def state(self) -> dict[str, Any]:
        """Returns what was learned, as plain values that survive JSON.

        Those are finite numbers, texts, lists, and dicts with texts as keys.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state`` of an earlier balancer of this provider returned."""
