"""What the core calls on losses, advantages, filters and balancers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Objective(Protocol):
    """The loss of one micro-batch. Actions of all its records lie flat, so padding cannot matter.

    ``columns`` (A actions in all, R records; tensors on the trainer's device): record int64[A]
        (0..R-1), mask bool[A], advantage float32[A] (a record's scalar repeated, or per action),
        rollout_logp float32[A], and what ``requires`` names: old_logp, ref_logp, values, returns
        (float32[A]). A column not required may be absent. ``old_logp`` is under the weights before
        this step's first update.
    ``current``: logp float32[A] with gradient; entropy float32[A] with gradient if "entropy" is
        required; values float32[A] with gradient if "values" is required.

    Returns (loss_sum, weight_sum, metrics): the gradient of the update is sum(loss_sum) /
    sum(weight_sum) over all micro-batches and ranks. Both are 0-d. weight_sum depends on masks and
    lengths, never on log-probs: a trainer asks for it with other ones before it goes forward.
    metrics: name -> (sum, weight), both 0-d and detached, added up the same way.
    """

    requires: frozenset[str]

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]: ...


@dataclass(frozen=True, kw_only=True)
class GroupScalars:
    """One group, in numbers. rewards float64[S]: weighted sum of the named rewards; lengths
    int64[S]: actions.

    scalars: per-record results of preparation, by name, float64[S] each (those the advantage's
        ``requires`` names).
    """

    rewards: np.ndarray
    lengths: np.ndarray
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)


@runtime_checkable
class Advantage(Protocol):
    """Level "record": rewards of groups to one number per record. Pure."""

    group_size: int
    requires: frozenset[str]

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        """float64[K] summed over the shards before ``of``; length 0 when no batch statistics are
        needed.
        """

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        """float64[S] per group."""


@runtime_checkable
class ActionAdvantage(Protocol):
    """Level "action": runs on trainer ranks, where per-action values are. Pure."""

    group_size: int
    requires: frozenset[str]

    def per_action(
        self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64[A] each, from per-action rewards and values of one
        record.
        """


@runtime_checkable
class Filter(Protocol):
    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        """(teaches, named reason when it does not)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is known of N records that are to be trained on.

    group int64[N]: equal where records have one prompt; they are neighbours. prompt, actions
    int64[N]: how many tokens, or denoising steps. extra float64[N]: what a record's producer said
    it costs besides, in tokens' worth; 0 where nothing was said. Raises ContractError unless it is
    finite and not negative.
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
        """int64[N]: prompt and actions."""
        return np.asarray(self.prompt + self.actions)

    def take(self, indexes: np.ndarray | Sequence[int]) -> Work:
        """Some of the records, in that order."""
        at = np.asarray(indexes, np.int64)
        return Work(
            group=self.group[at],
            prompt=self.prompt[at],
            actions=self.actions[at],
            extra=self.extra[at],
        )


@runtime_checkable
class Balancer(Protocol):
    """Which records train on which data-parallel rank. Pure and deterministic, both of them."""

    def costs(self, work: Work) -> np.ndarray:
        """float64[N], finite and not negative: how long each record will take, in any unit."""

    def split(self, work: Work, bins: int) -> list[list[int]]:
        """Indexes of the records per bin, each exactly once. A bin may stay empty."""


@runtime_checkable
class LearnsCosts(Protocol):
    """Capability "costs.learned" of a balancer."""

    def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
        """What each data-parallel rank had in a step, and how long it worked: float64[ranks],
        finite and positive.

        Returns R2 of what it would have predicted of the latest steps, each before it saw that
        step; None while there is nothing to say. Not called in a run that is to repeat bit for bit.
        """


@runtime_checkable
class KeepsCosts(Protocol):
    """Of a balancer with the capability "costs.learned", which may do without: a resumed run goes
    on with what it learned.
    """

    def state(self) -> dict[str, Any]:
        """Plain values, of which JSON gives the same back: finite numbers, texts, lists, dicts with
        texts as keys.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state`` of another one like this gave."""
