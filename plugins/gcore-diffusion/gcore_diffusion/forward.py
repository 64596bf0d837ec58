"""Objectives of the forward process.

They need clean latents and rewards, and no log-prob of any step.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gcore_diffusion.config import NftConfig

#: An objective that requires it gets rows of the forward process (see ``rows``) in place of
#: transitions, with columns error, old_error and cross, float32[R]: mean over dimensions of |v -
#: u|^2, |v_old - u|^2 and (v_old - u)(v - u), u being the flow from clean to noise.
FORWARD = "diffusion:forward"


class Nft:
    """DiffusionNFT's loss, which draws the model to good images and away from bad ones.

    The loss of a row is (r |v+ - u|^2 + (1 - r) |v- - u|^2) / beta. u is the flow from clean to
    noise, v+ = (1 - beta) v_old + beta v, v- = (1 + beta) v_old - beta v, and r goes from 0 to 1
    with the advantage. The squares are expanded, so that three numbers a row are enough.

    Source: Zheng et al., "DiffusionNFT: Online Diffusion Reinforcement with Forward Process",
    arXiv:2509.16117, Eq. 5.
    """

    requires = frozenset({"old_logp", FORWARD})

    def __init__(self, config: NftConfig) -> None:
        self._beta = config.beta
        self._clip = config.advantage_clip

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """See ``Objective.loss``. The metric ``flow_error`` is the mean of |v - u|^2."""
        mask = columns["mask"].to(current["logp"].dtype)
        weight = self.weight(columns)
        beta = self._beta
        goodness = (columns["advantage"] / self._clip).clamp(-1, 1) / 2 + 0.5
        plus, minus = (self._error(columns, sign * beta) for sign in (1, -1))
        loss = (goodness * plus + (1 - goodness) * minus) / beta
        metrics = {"flow_error": ((columns["error"].detach() * mask).sum(), weight)}
        return (loss * mask).sum(), weight, metrics

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        # There may be no log-probs, because a forward-process objective needs none.
        return columns["mask"].to(columns["advantage"].dtype).sum()

    @staticmethod
    def _error(columns: Mapping[str, Tensor], share: float) -> Tensor:
        """Returns |(1 - share) (v_old - u) + share (v - u)|^2, float32[R]."""
        old_share = 1 - share
        return (
            old_share**2 * columns["old_error"]
            + 2 * share * old_share * columns["cross"]
            + share**2 * columns["error"]
        )
