"""The loss of a critic, in torch; it runs on the ranks of whichever trainer serves the role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gcore_algorithms.critic.config import ValueLossConfig

if TYPE_CHECKING:
    from torch import Tensor


class ValueLoss:
    """Half the squared error of values against returns R, with PPO's clip.

    With v the value and v_old that of before the step's first update, an action's loss is

        1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)

    so that moving a value beyond c only ever costs. Averaged over trained actions.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347, Eq. 9 (its
    squared error); the clip is that of the paper's code, openai/baselines ppo2, which all
    implementations have taken over.

    Metrics: value_loss, the unclipped half squared error; value_clip_share, the share of trained
    actions whose value has moved beyond c.
    """

    def __init__(self, config: ValueLossConfig) -> None:
        self.requires = config.traits().requires
        self._clip = config.clip

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Returns (loss_sum, weight_sum, metrics); see ``Objective.loss``."""
        mask = columns["mask"]
        values = current["values"][mask]
        returns = columns["returns"][mask]
        weight = self.weight(columns)
        plain = (values - returns) ** 2 / 2
        terms = plain
        moved = (values - columns["old_values"][mask]).detach().abs() > self._clip
        if self._clip:
            old = columns["old_values"][mask]
            clipped = values.clamp(min=old - self._clip, max=old + self._clip)
            terms = plain.maximum((clipped - returns) ** 2 / 2)
        share = moved.sum().float() if self._clip else weight * 0
        metrics = {
            "value_loss": (plain.detach().sum(), weight),
            "value_clip_share": (share, weight),
        }
        return terms.sum(), weight, metrics

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns how many trained actions there are, 0-d."""
        return columns["mask"].sum().float()
