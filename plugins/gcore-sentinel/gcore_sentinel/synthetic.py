"""Synthetic gaps with the tail of real ones, and the faults that are planted in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gcore_core.contract.sentinel import Compared
from gcore_sentinel.evidence import EDGES, Table, quantiles_of, worst_shares_of

SAMPLES = 8
ACTIONS = 8


def typical_gap(trainer: np.ndarray) -> np.ndarray:
    """Returns the scale of healthy bfloat16 gaps: 1e-6 at probability .9999, .04 at .01."""
    scale: np.ndarray = 0.02 * (1 - np.exp(trainer)) ** 0.7 + 1e-6
    return scale


def healthy(generator: np.random.Generator, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws (trainer, gaps), float32 and float64, both [groups, SAMPLES * ACTIONS].

    Tails are those of Student's t with 2 degrees of freedom (Hill index 2). Actions of a group
    share a part of their size, so that their exceedances come together (design effect about 4).
    """
    shape = (groups, SAMPLES * ACTIONS)
    trainer = -generator.gamma(0.35, 1.2, shape).astype(np.float32)
    shared = np.exp(0.5 * generator.standard_normal((groups, 1)))
    gaps = typical_gap(trainer) * shared * generator.standard_t(2, shape) / 3
    return trainer, gaps


def table_of(trainer: np.ndarray, gaps: np.ndarray, groups: int = 64) -> Table:
    """Makes a table.

    trainer, gaps: float[n, actions], a row for each group.
    groups: of a step.
    """
    quantiles = quantiles_of(np.abs(gaps).ravel(), np.digitize(trainer.ravel(), EDGES))
    table = Table(quantiles=quantiles, worst_shares=np.zeros(4))
    sums = counts_of_groups(trainer, gaps, table)
    steps = np.add.reduceat(sums, np.arange(0, len(sums), groups), axis=0)
    return replace(table, worst_shares=worst_shares_of(steps))


def counts_of_groups(trainer: np.ndarray, gaps: np.ndarray, table: Table) -> np.ndarray:
    """``counts`` of every group at once, float64[groups, 6]."""
    limits = table.quantiles[np.digitize(trainer, EDGES)] + 2e-6
    over = ~(np.abs(gaps)[..., None] <= limits)
    columns = []
    for part in (trainer < -0.03, trainer >= -0.03):
        columns += [part.sum(axis=1), *((over & part[..., None]).sum(axis=1).T)]
    return np.stack(columns, axis=1).astype(np.float64)


def records(
    generator: np.random.Generator,
    groups: int = 32,
    *,
    noise: float = 1.0,
    fault: Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray] | None = None,
    step: int = 3,
) -> list[Compared]:
    """Draws records of a softmax over 8 tokens, with entropies, so that temperatures are real.

    fault: (generator, logits [A, 8], actions [A]) -> the rollout's log-probs [A].
    """
    drawn = []
    for ordinal in range(groups):
        for sample in range(SAMPLES):
            logits = 2.5 * generator.standard_normal((ACTIONS, 8))
            logps = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            actions = np.array([generator.choice(8, p=np.exp(row)) for row in logps])
            trainer = logps[np.arange(ACTIONS), actions]
            rollout = trainer if fault is None else fault(generator, logits, actions)
            rounding = noise * typical_gap(trainer) * generator.standard_t(3, ACTIONS) / 4
            drawn.append(
                Compared(
                    ordinal=ordinal,
                    sample=sample,
                    step=step,
                    replica=0,
                    version=step,
                    rollout_logp=(rollout + rounding).astype(np.float32),
                    trainer_logp=trainer.astype(np.float32),
                    mask=np.ones(ACTIONS, bool),
                    entropy=(-(np.exp(logps) * logps).sum(axis=1)).astype(np.float32),
                    prompt_ids=np.array([1, 2, ordinal], np.int32),
                    action_ids=actions.astype(np.int32),
                )
            )
    return drawn
