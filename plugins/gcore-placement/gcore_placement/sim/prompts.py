"""Provides ``sim/prompts``: rows that say how long their prompt and the answers to it are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gcore_core.contract.order import row_of
from gcore_core.contract.records import Prompt
from gcore_placement.sim.config import KINDS, Drift, PromptsConfig, Skew

_PROMPT_SIGMA = 0.5


@dataclass(frozen=True)
class AnswerLengths:
    """A log-normal distribution of answers' lengths in tokens.

    median: the median length.
    sigma: the standard deviation of the length's logarithm.
    limit: the length at which an answer is truncated; draws may be longer.
    """

    median: float
    sigma: float
    limit: int

    def draw(self, seed: int) -> int:
        """Returns a length for a seed: at least one token, and perhaps more than the limit."""
        normal = np.random.Generator(np.random.Philox(key=seed)).standard_normal()
        return max(1, math.ceil(self.median * math.exp(self.sigma * normal)))


class SimPrompts:
    """Makes rows whose fields say how long everything about them is.

    prompt_tokens: tokens of the prompt.
    answer_median, answer_limit: tokens; see ``AnswerLengths``.
    answer_sigma: see ``AnswerLengths``.
    verdict_median, verdict_sigma, verdict_limit: the same of a verdict; only where rows drift.
    teaches: whether the group's rewards differ; only where rows drift.
    """

    def __init__(self, config: PromptsConfig) -> None:
        self._config = config
        self._longer = (
            _rows_of_a_shard(config.rows, config.skew) if config.skew.shards else frozenset()
        )

    def __len__(self) -> int:
        return self._config.rows

    def __getitem__(self, row: int) -> Prompt:
        config = self._config
        if not 0 <= row < config.rows:
            raise IndexError(f"row {row} of {config.rows}")
        prompt, median, sigma, limit = KINDS[config.kind]
        # `shared` is the part of an answer's log-length that the prompt decides; the rest of the
        # variance, which `sigma` keeps below, is drawn for each answer.
        prompt_draw, answer_draw = (
            np.random.Generator(np.random.Philox(key=[config.seed, row]))
            .standard_normal(2)
            .tolist()
        )
        tokens = prompt * math.exp(_PROMPT_SIGMA * prompt_draw)
        answer = median * math.exp(sigma * math.sqrt(config.correlation) * answer_draw)
        sigma *= math.sqrt(1 - config.correlation)
        if config.prompt_tokens:
            tokens = config.prompt_tokens[row % len(config.prompt_tokens)]
        drifted: dict[str, Any] = {}
        if config.drift.ordinals:
            drift = config.drift
            x = _drifted(config.drift, config.rows)[row]
            sigma = drift.answer_sigma
            limit = drift.answer_limit
            answer = _between(drift.answer, x) * math.exp(
                sigma * math.sqrt(config.correlation) * answer_draw
            )
            sigma *= math.sqrt(1 - config.correlation)
            chance = np.random.Generator(np.random.Philox(key=[config.seed + 1, row])).random()
            drifted = {
                "verdict_median": _between(drift.verdict, x),
                "verdict_sigma": drift.verdict_sigma,
                "verdict_limit": drift.verdict_limit,
                "teaches": bool(chance < drift.keep[0] + x * (drift.keep[1] - drift.keep[0])),
            }
        if config.answer_tokens:
            answer = float(config.answer_tokens[row % len(config.answer_tokens)])
            sigma = 0.0
            limit = max(config.answer_tokens)
        if row in self._longer:
            tokens = tokens * config.skew.factor
            answer = answer * config.skew.answer_factor
        return Prompt(
            row=row,
            text=f"row {row}",
            fields={
                "prompt_tokens": max(1, round(tokens)),
                "answer_median": answer,
                "answer_sigma": sigma,
                "answer_limit": limit,
                **drifted,
            },
        )


def answer_lengths(fields: Mapping[str, Any], default: AnswerLengths) -> AnswerLengths:
    """Returns the lengths that a row's fields say, or ``default`` where they say nothing.

    The limit is the lower one of both.
    """
    if "answer_median" not in fields:
        return default
    limit = min(fields["answer_limit"], default.limit)
    return AnswerLengths(fields["answer_median"], fields["answer_sigma"], limit)


@lru_cache(maxsize=8)
def _rows_of_a_shard(rows: int, skew: Skew) -> frozenset[int]:
    """Returns the rows whose ordinals in the first pass belong to the skewed shard."""
    return frozenset(
        row_of(ordinal, rows, skew.seed)[1] for ordinal in range(skew.shard, rows, skew.shards)
    )


def _between(ends: Sequence[float], x: float) -> float:
    """Interpolates between two ends geometrically, x from 0 to 1."""
    return float(ends[0] * (ends[1] / ends[0]) ** x)


@lru_cache(maxsize=8)
def _drift_of_rows(ordinals: int, rows: int, seed: int) -> tuple[float, ...]:
    """Returns how far each row has drifted, from 0 to 1, by its ordinal in the first pass."""
    drift_of_row = [0.0] * rows
    for ordinal in range(rows):
        drift_of_row[row_of(ordinal, rows, seed)[1]] = min(ordinal / ordinals, 1.0)
    return tuple(drift_of_row)


def _drifted(drift: Drift, rows: int) -> tuple[float, ...]:
    """Returns how far each row has drifted; see ``_drift_of_rows``."""
    return _drift_of_rows(drift.ordinals, rows, drift.seed)
