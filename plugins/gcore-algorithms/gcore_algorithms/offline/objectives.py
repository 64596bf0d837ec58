"""Losses of training without generation, as sums that add up over micro-batches and ranks.

Notation of a pair: chosen answer w, rejected answer l, of one prompt x.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from gcore_algorithms.layout import Records
from gcore_algorithms.offline.config import BradleyTerryConfig, DpoConfig, ScalarConfig, SftConfig
from gcore_core.contract.errors import DataError

Metrics = dict[str, tuple[Tensor, Tensor]]

#: Number of the chosen and of the rejected record in their group.
CHOSEN = 0
REJECTED = 1


class Sft:
    """Supervised fine-tuning: -log p of the trained tokens.

    normalise: token    sum over all trained tokens / their number
               record   each record's mean over its trained tokens, averaged over the records

    Metrics: loss_per_token and loss_per_record, whatever the loss is a mean over.
    """

    requires: frozenset[str] = frozenset()

    def __init__(self, config: SftConfig) -> None:
        self._by_token = config.normalise == "token"

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Returns the summed loss, its normaliser and the metrics of one micro-batch.

        columns: record int64[A], mask bool[A].
        current: logp float[A] with gradient.
        """
        trained = columns["mask"].nonzero().squeeze(1)
        loss = -current["logp"].index_select(0, trained)
        record = columns["record"].index_select(0, trained)
        cut_into = columns["rows"].index_select(0, trained) if "rows" in columns else None
        owners = Records(record, like=loss, rows=cut_into)
        of_records = owners.means(loss)
        tokens = loss.new_full((), len(trained))
        records = owners.count
        metrics = {
            "loss_per_token": (loss.detach().sum(), tokens),
            "loss_per_record": (of_records.detach().sum(), records),
            **_no_kl(loss),
        }
        if self._by_token:
            return loss.sum(), tokens, metrics
        return of_records.sum(), records, metrics

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the number of trained tokens, or of records that have any, 0-d."""
        mask = columns["mask"]
        like = columns["rollout_logp"]
        if self._by_token:
            return like.new_full((), int(mask.sum()))
        rows = columns["rows"][mask] if "rows" in columns else None
        return Records(columns["record"][mask], like=like, rows=rows).count


class Dpo:
    """Direct preference optimisation, a mean over pairs of

        sigmoid  -(1 - e) log sigmoid(b h) - e log sigmoid(-b h)
        hinge    max(0, 1 - b h)
        ipo      (h - 1 / (2 b))^2

    where h = [log pi(w|x) - log ref(w|x)] - [log pi(l|x) - log ref(l|x)], b is beta and e
    ``label_smoothing``. An answer's log-prob is the sum over its trained tokens; with
    ``length_normalised`` their mean.

    Sources:

    - Rafailov et al., "Direct Preference Optimization", arXiv:2305.18290, Eq. 7.
    - Label smoothing: Mitchell, "A note on DPO with noisy preferences and relationship to IPO",
      2023, Eq. 3 (cDPO).
    - Hinge: Zhao et al., "SLiC-HF", arXiv:2305.10425, with rewards b log(pi / ref) as in Liu et
      al., arXiv:2309.06657, Eq. 11.
    - IPO: Azar et al., "A General Theoretical Paradigm to Understand Learning from Human
      Preferences", arXiv:2310.12036, Eq. 17, whose tau is b.
    - Length-normalised: Lambert et al., "Tulu 3", arXiv:2411.15124, Eq. 6.

    Both records of a pair are in one micro-batch, since ``group`` is required. So the gradient is
    exact, and no pass is needed to find a pair's coefficient first.

    Metrics, means over pairs: rewards/chosen and rewards/rejected, b (log pi - log ref) of each
    answer; rewards/margin, their difference; rewards/accuracy, the share of pairs in which it is
    positive; logp/chosen and logp/rejected, sums over an answer's tokens.
    """

    def __init__(self, config: DpoConfig) -> None:
        self.requires = config.traits().requires
        self._config = config

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Returns the summed loss, the number of pairs and the metrics of one micro-batch.

        columns: group, sample int64[A], mask bool[A], ref_logp float[A].
        current: logp float[A] with gradient.
        """
        config = self._config
        pairs = _Pairs(columns)
        logp = current["logp"]
        advances = pairs.sums(logp - columns["ref_logp"])
        if config.length_normalised:
            advances = advances / pairs.sums(torch.ones_like(logp)).clamp(min=1)
        ratio = advances[:, CHOSEN] - advances[:, REJECTED]
        loss = self._of(ratio)
        count = loss.new_full((), len(loss))
        rewards = config.beta * advances.detach()
        logps = pairs.sums(logp.detach())
        metrics = {
            **_reward_metrics(rewards[:, CHOSEN], rewards[:, REJECTED], count),
            "logp/chosen": (logps[:, CHOSEN].sum(), count),
            "logp/rejected": (logps[:, REJECTED].sum(), count),
            **_no_kl(loss),
        }
        return loss.sum(), count, metrics

    def _of(self, ratio: Tensor) -> Tensor:
        """Returns the loss of each pair, from h float[G]."""
        config = self._config
        scaled = config.beta * ratio
        if config.variant == "hinge":
            return torch.relu(1 - scaled)
        if config.variant == "ipo":
            return (ratio - 1 / (2 * config.beta)) ** 2
        smoothing = config.label_smoothing
        return -(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled)

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the number of pairs, 0-d."""
        return columns["rollout_logp"].new_full((), _Pairs(columns).count)


class BradleyTerry:
    """A reward model of pairs, a mean over pairs of

        -log sigmoid(r(w) - r(l) - m d) + c (r(w) + r(l))^2

    where r is the value after an answer's last token, d the row's margin, m the setting ``margin``
    and c ``centring``.

    Sources:

    - Bradley and Terry, "Rank Analysis of Incomplete Block Designs", 1952; as a loss: Ouyang et
      al., "Training language models to follow instructions with human feedback", arXiv:2203.02155,
      Eq. 1.
    - Margin: Touvron et al., "Llama 2", arXiv:2307.09288, Eq. 2.
    - Centring: Eisenstein et al., "Helping or Herding?", arXiv:2312.09244, Eq. 2.

    Metrics, means over pairs: rewards/chosen, rewards/rejected, rewards/margin, rewards/accuracy.
    """

    def __init__(self, config: BradleyTerryConfig) -> None:
        self.requires = config.traits().requires
        self._config = config

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Returns the summed loss, the number of pairs and the metrics of one micro-batch.

        columns: of S states: group, sample int64[S], end bool[S], label float[S] for a margin.
        current: values float[S] with gradient.
        """
        config = self._config
        pairs = _Pairs(columns, columns["end"])
        rewards = pairs.sums(current["values"])
        chosen = rewards[:, CHOSEN]
        rejected = rewards[:, REJECTED]
        difference = chosen - rejected
        wanted = difference
        if config.margin:
            wanted = difference - config.margin * pairs.sums(columns["label"])[:, CHOSEN]
        loss = -logsigmoid(wanted)
        if config.centring:
            loss = loss + config.centring * (chosen + rejected) ** 2
        count = loss.new_full((), len(loss))
        metrics = _reward_metrics(chosen.detach(), rejected.detach(), count)
        return loss.sum(), count, metrics

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the number of pairs, 0-d."""
        return columns["rollout_logp"].new_full((), _Pairs(columns).count)


class Scalar:
    """A reward model of scored answers, a mean over records of

        square    (r - s)^2 / 2 + c r^2
        logistic  -s log sigmoid(r) - (1 - s) log sigmoid(-r) + c r^2

    where r is the value after the answer's last token, s the row's score and c ``centring``.

    Source of the logistic loss on graded answers: Cobbe et al., "Training Verifiers to Solve Math
    Word Problems", arXiv:2110.14168, Section 4; the square is least squares.

    Metrics, means over records: rewards/mean; rewards/error, the absolute difference of reward (or
    of its sigmoid) and score.
    """

    def __init__(self, config: ScalarConfig) -> None:
        self.requires = config.traits().requires
        self._config = config

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Returns the summed loss, the number of records and the metrics of one micro-batch.

        columns: of S states: end bool[S], label float[S].
        current: values float[S] with gradient.

        Raises DataError for a score that is no probability, where the loss is logistic.
        """
        end = columns["end"]
        rewards = current["values"][end]
        scores = columns["label"][end].to(rewards.dtype)
        if self._config.loss == "square":
            loss = (rewards - scores) ** 2 / 2
            guesses = rewards.detach()
        else:
            _check_probabilities(scores)
            loss = binary_cross_entropy_with_logits(rewards, scores, reduction="none")
            guesses = rewards.detach().sigmoid()
        if self._config.centring:
            loss = loss + self._config.centring * rewards**2
        count = loss.new_full((), len(loss))
        metrics = {
            "rewards/mean": (rewards.detach().sum(), count),
            "rewards/error": ((guesses - scores).abs().sum(), count),
        }
        return loss.sum(), count, metrics

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the number of records, 0-d."""
        return columns["rollout_logp"].new_full((), len(columns["record"].unique()))


def _check_probabilities(scores: Tensor) -> None:
    """Raises DataError for a score outside of 0..1: the logistic loss has no least value there."""
    outside = scores[(scores < 0) | (scores > 1)]
    if len(outside):
        raise DataError(
            f"the score {float(outside[0]):g} of a row is no probability",
            where="objective.config.loss",
            why="logistic takes scores from 0 to 1, and the reward as their logit",
            todo="bring the rows' scores into 0..1, or set loss: square",
        )


class _Pairs:
    """Sums over the terms of each answer of a micro-batch's pairs.

    count: how many pairs have a trained term.

    columns: group, sample int64[A], mask bool[A].
    terms: which of them count, bool[A]; None: those that are trained on.
    """

    def __init__(self, columns: Mapping[str, Tensor], terms: Tensor | None = None) -> None:
        counted = columns["mask"] if terms is None else terms
        self._terms = counted.nonzero().squeeze(1)
        group = columns["group"].index_select(0, self._terms)
        # Groups are numbered anew: one without a term here is none.
        numbers, place = group.unique(return_inverse=True)
        self.count = len(numbers)
        self._slot = 2 * place + columns["sample"].index_select(0, self._terms)

    def sums(self, values: Tensor) -> Tensor:
        """Returns float[G, 2]: the sum of ``values`` float[A] over each answer's terms."""
        zeros = values.new_zeros(2 * self.count)
        return zeros.index_add(0, self._slot, values.index_select(0, self._terms)).view(-1, 2)


def _sums(values: Tensor, record: Tensor) -> Tensor:
    """Returns float[R], each record's sum of ``values`` float[A]."""
    count = int(record.max()) + 1 if record.numel() else 0
    return values.new_zeros(count).index_add(0, record, values)


def _reward_metrics(chosen: Tensor, rejected: Tensor, count: Tensor) -> Metrics:
    """Returns the metrics of pairs' rewards, float[G] each; no gradient flows through them."""
    margin = chosen - rejected
    return {
        "rewards/chosen": (chosen.sum(), count),
        "rewards/rejected": (rejected.sum(), count),
        "rewards/margin": (margin.sum(), count),
        "rewards/accuracy": ((margin > 0).sum(dtype=margin.dtype), count),
    }


def _no_kl(like: Tensor) -> Metrics:
    """Returns the metric ``kl`` as 0: nothing was sampled, so there is no policy to differ from."""
    zero = like.new_zeros(())
    return {"kl": (zero, zero)}
