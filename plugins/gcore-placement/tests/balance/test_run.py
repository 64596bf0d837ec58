"""A run tells how even its ranks were, and teaches the balancer what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_testing.simulation import Outcome, SimulatedJob, run_virtual, simulate

from gcore_core.contract.factories import FactorySpec

COST = FactorySpec(
    "gcore_placement.balance.balancers:Cost",
    "gcore_placement.balance.config:CostConfig",
    {"hidden_size": 64},
)
TOKENS = FactorySpec(
    "gcore_placement.balance.balancers:LptTokens", "gcore_placement.balance.config:TokensConfig", {}
)


def run(tmp_path: Path, **changes) -> Outcome:
    return run_virtual(
        simulate(SimulatedJob(shards=2, ranks=2, steps=4, **changes), tmp_path / "store")
    )


def metrics(outcome: Outcome, name: str) -> list[float | None]:
    """Of each step; None where it was not told."""
    return [report.metrics.get(name) for report in outcome.reports[1:]]


def test_every_step_reports_planned_and_achieved_imbalance(tmp_path):
    steps_metrics = run(tmp_path, balance=COST)
    for name in ("balance_planned", "balance_achieved"):
        assert all(
            value is not None and 1 <= value <= 2 for value in metrics(steps_metrics, name)
        ), name
    # the first step has no prediction to compare with
    first, *later = metrics(steps_metrics, "balance_r2")
    assert first is None and all(value is not None and value <= 1 for value in later)


def test_records_are_dealt_evenly_and_every_balancer_has_the_same_minibatches(tmp_path):
    in_order = run(tmp_path / "1")
    cost = run(tmp_path / "2", balance=COST)
    assert max(metrics(cost, "balance_planned")) < min(
        1.1, max(metrics(in_order, "balance_planned"))
    )
    minibatch = {key[:2]: key[2] for batch in in_order.batches for key in batch}
    both = [key for batch in cost.batches for key in batch if key[:2] in minibatch]
    assert both and all(minibatch[key[:2]] == key[2] for key in both)


@pytest.mark.parametrize(
    "changes", [{"balance": TOKENS}, {"balance": COST, "deterministic": True}], ids=str
)
def test_costs_are_not_learned_by_an_unable_balancer_or_in_a_deterministic_run(tmp_path, changes):
    assert metrics(run(tmp_path, **changes), "balance_r2") == [None] * 4
