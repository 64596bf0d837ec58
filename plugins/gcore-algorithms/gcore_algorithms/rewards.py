"""Penalties that look at a completion's actions alone: its length, its repetitions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gcore_algorithms.config import OverlongConfig, RepetitionConfig
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import Score, ScoredRecord, failure


class Overlong:
    """DAPO's soft overlong punishment: 0 for most lengths, then down to -1 at the longest.

    Source: Yu et al., "DAPO", arXiv:2503.14476, Eq. 13, with L_max = max_actions and L_cache =
    soft_actions. A completion that is cut off at max_actions gets -1; one that ends a little before
    gets less, so that a policy has a slope to follow.
    """

    def __init__(self, config: OverlongConfig, context: WorkerContext) -> None:
        self._free_actions = config.max_actions - config.soft_actions
        self._soft_actions = config.soft_actions

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Scores every record by what the policy said; what it was given does not count."""
        return [
            Score(value=self._penalty(int(np.count_nonzero(record.columns["action_mask"]))))
            for record in records
        ]

    def _penalty(self, actions: int) -> float:
        over = actions - self._free_actions
        return max(min(0.0, -over / self._soft_actions), -1.0)


class Repetition:
    """The penalty of repeated n-grams: -scale x (1 - different n-grams / n-grams).

    A completion that is shorter than an n-gram gets 0. Masked actions count too.

    Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv:2502.03373,
    Algorithm 1, which punishes each repeated n-gram where it stands; a reward of the whole record
    has their share.
    """

    def __init__(self, config: RepetitionConfig, context: WorkerContext) -> None:
        self._ngram = config.ngram
        self._scale = config.scale

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return [self._score(record) for record in records]

    def _score(self, record: ScoredRecord) -> Score:
        tokens = record.columns.get("action_ids")
        if tokens is None:
            return failure("its actions are no tokens, so it has no n-grams")
        if len(tokens) < self._ngram:
            return Score(value=0.0)
        ngrams = np.lib.stride_tricks.sliding_window_view(tokens, self._ngram)
        different = len(np.unique(ngrams, axis=0))
        return Score(value=-self._scale * (1.0 - different / len(ngrams)))
