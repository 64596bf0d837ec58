"""Devices that move between an emulated policy and an emulated judge, on virtual time through the
real controllers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_placement import costs
from gcore_placement.explain import run as explain
from gcore_placement.sim.command import run
from gcore_placement.sim.config import Drift, PromptsConfig
from gcore_placement.sim.prompts import SimPrompts

from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError, PlacementError
from gcore_core.contract.order import row_of

pytestmark = pytest.mark.rest


def test_lengths_and_keep_rates_of_rows_drift_with_their_ordinals() -> None:
    drift = Drift(
        ordinals=100, answer=[10.0, 1000.0], verdict=[400.0, 100.0], keep=[1.0, 0.01], seed=3
    )
    data = SimPrompts(PromptsConfig(rows=128, correlation=0.0, drift=drift))
    told = [data[row_of(ordinal, 128, 3)[1]].fields for ordinal in range(128)]
    assert [
        told[0]["answer_median"],
        told[50]["answer_median"],
        told[127]["answer_median"],
    ] == pytest.approx([10, 100, 1000])
    assert told[50]["verdict_median"] == pytest.approx(200)
    assert sum(row["teaches"] for row in told[:40]) > sum(row["teaches"] for row in told[60:100])


def test_a_drift_of_one_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drift.keep: must be two positive numbers"):
        Drift(keep=[0.5])


@pytest.mark.parametrize("use", ["placement/replay", "placement/colocated"])
def test_a_run_journals_where_its_devices_spent_the_step(
    use: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_job: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = {"sleep_s": 1.0, "wake_s": 1.0, "weights_gb": 1.0}
    roles = {name: {"use": "sim", "slots": 4, "config": generator} for name in ("rollout", "judge")}
    job = write_job(
        run={"steps": 3},
        cluster={"devices": 4},
        placement={"use": use},
        roles=roles,
        data={"config": {"rows": 256, "drift": {"ordinals": 40, "keep": [0.7, 0.6]}}},
        filter={"use": "core/varied"},
        rewards={"judged": {"use": "sim/asks", "role": "judge"}},
    )
    assert run([str(job), "run.dir=run"]) == 0
    decisions, outcomes = run_files.read_placement(Path("run"))
    assert set(outcomes) == {0, 1, 2} and set(decisions) == {0, 1, 2, 3}
    lines = [
        json.loads(line)["metrics"]
        for line in Path("run", "metrics.jsonl").read_text().splitlines()
    ]
    steps = [metrics for metrics in lines if "seconds/step" in metrics]
    for outcome, metrics in zip(outcomes.values(), steps, strict=True):
        assert len(outcome.ran) == 4, "every device has its row"
        for causes in costs.spent(outcome).values():
            inside = sum(
                s for cause, s in causes.items() if cause.endswith(("runs", "waits", "wait"))
            )
            assert inside + outcome.turns_s == pytest.approx(outcome.measured_s, rel=1e-3)
        assert metrics["placement/idle_share"] == pytest.approx(sum(costs.idle(outcome).values()))
    if use.endswith("colocated"):
        assert all(outcome.switch_s >= 2.0 for outcome in outcomes.values())
    capsys.readouterr()
    assert explain(["run", "--step", "2"]) == 0
    assert "measured:" in capsys.readouterr().out


def test_the_least_of_a_role_reaches_the_policy_and_too_large_a_least_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_job: Callable[..., Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    roles = {
        name: {"use": "sim", "slots": 4, "config": {"sleep_s": 1.0}}
        for name in ("rollout", "judge")
    }
    job = write_job(
        run={"steps": 2},
        cluster={"devices": 4},
        placement={"use": "placement/replay"},
        roles=roles,
        data={"config": {"rows": 256}},
        filter={"use": "core/varied"},
        rewards={"judged": {"use": "sim/asks", "role": "judge"}},
    )
    assert run([str(job), "run.dir=run", "roles.judge.least=3"]) == 0
    decisions, _ = run_files.read_placement(Path("run"))
    assert len(decisions) >= 2
    for decided in decisions.values():
        assert decided.mode == "colocated" or len(decided.cells["judge"]) == 3, (
            "one is left to the policy"
        )
    refused = ["roles.judge.least=3", "roles.rollout.least=2"]
    with pytest.raises(PlacementError, match="generators need at least 5 cells"):
        run([str(job), "run.dir=other", *refused])


def test_utilisation_with_signal_filled_is_measured_and_moves_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_job: Callable[..., Path]
) -> None:
    """A run measures how full each role's places are, and devices go to the fuller role."""
    monkeypatch.chdir(tmp_path)
    roles = {name: {"use": "sim", "slots": 4} for name in ("rollout", "judge")}
    job = write_job(
        run={"steps": 4},
        cluster={"devices": 4},
        placement={
            "use": "placement/utilisation",
            "config": {"signal": "filled", "threshold": 0.0, "share": 0.5},
        },
        roles=roles,
        rewards={"judged": {"use": "sim/asks", "role": "judge"}},
    )
    assert run([str(job), "run.dir=run"]) == 0
    decisions, _ = run_files.read_placement(Path("run"))
    measured = [decisions[step].seen for step in (1, 2, 3)]
    assert all(0 < seen["policy"] <= 1 and 0 < seen["judge"] <= 1 for seen in measured)
    cells = [len(decisions[step].cells["judge"]) for step in range(4)]
    for before, after, seen in zip(cells, cells[1:], measured, strict=False):
        fuller_judge = seen["judge"] > seen["policy"]
        assert after == (min(before + 1, 3) if fuller_judge else max(before - 1, 1))
    assert len(set(cells)) > 1
