"""A log-prob that is no number is the largest of gaps, and never none."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gcore_language.progress import Progress

from gcore_core.contract.errors import WeightMismatch
from gcore_core.controllers.training import check_logprobs


def compared(*rollout_logp: float, mask: tuple[float, ...] = (1.0, 1.0)) -> dict[str, float]:
    columns = {
        "mask": torch.tensor(mask),
        "fresh": torch.ones(2),
        "rollout_logp": torch.tensor(rollout_logp),
    }
    batch: Any = SimpleNamespace(columns=columns)
    progress = Progress(step=0)
    progress.compare(torch.full((2,), -1.0), batch)
    sums = {name: terms[0] for name, terms in progress.terms.items()}
    return progress.metrics(sums, progress.gap)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_no_number_ends_the_run(odd: float) -> None:
    metrics = compared(-1.0, odd)
    assert metrics["logprob_gap_max"] == math.inf and metrics["logprob_gap_share"] == 0.5
    with pytest.raises(WeightMismatch, match="disagree by inf"):
        check_logprobs(3, metrics, 1e-3)


def test_what_stands_at_an_action_that_is_not_trained_on_is_not_compared() -> None:
    metrics = compared(-1.25, math.nan, mask=(1.0, 0.0))
    assert metrics["logprob_gap_max"] == metrics["logprob_gap_mean"] == 0.25
