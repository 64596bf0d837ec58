"""Training on a window of stochastic steps that moves (MixGRPO, arXiv:2507.21802) learns, all other
steps being deterministic.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from gcore_diffusion.config import ClassifierConfig
from gcore_diffusion.rewards import Classifier

from gcore_core.contract.context import WorkerContext
from tests.support import diffusion_models as kit

pytestmark = pytest.mark.rest


@pytest.mark.parametrize(
    ("moves", "steps", "gain"),
    [("slide", 8, 0.06), ("random", 15, 0.08)],
)
def test_a_moving_window_of_two_steps_learns_the_digits(
    taught_dir: Path, moves: str, steps: int, gain: float
) -> None:
    """The reward of 500 images by the deterministic sampler rises; measured: 0.10 and 0.11."""
    reward = Classifier(ClassifierConfig(path=str(taught_dir)), WorkerContext(role="scorer"))
    run = kit.run_digits(
        taught_dir, reward, {"window": 2, "window_moves": moves}, kl_coefficient=0.1
    )
    metrics_of_steps = [metrics for metrics, _ in islice(run, steps)]
    assert len({metrics["begins"] for metrics in metrics_of_steps}) > 4, "the window moves"
    assert max(metrics["logprob_gap_max"] for metrics in metrics_of_steps) <= 1e-6
    assert metrics_of_steps[-1]["greedy"] > metrics_of_steps[0]["greedy"] + gain
    assert metrics_of_steps[-1]["reward"] > metrics_of_steps[0]["reward"] + gain
