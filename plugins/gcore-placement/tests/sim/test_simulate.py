"""The simulated cluster, and the command in front of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_placement.balance.balancers import Cost
from gcore_placement.balance.config import CostConfig
from gcore_placement.config import ReplayConfig, SplitConfig
from gcore_placement.fixed import Colocated, FixedSplit
from gcore_placement.replay import Replay
from gcore_placement.sim.cluster import ORACLE, Cluster, simulate
from gcore_placement.sim.trying import summary
from gcore_placement.sim.workloads import PUBLISHED, Lengths, Published, recorded
from gcore_testing.installed import InstalledPlugins

from gcore_core import cli
from gcore_core.contract.errors import DataError

SMALL = Cluster(devices=32, needed=16)


def rows(policies: dict[str, Any], steps: int = 4, **options: Any) -> list[Any]:
    workload = Published(name=options.pop("workload", "steady"), steps=steps, samples=4)
    return list(simulate(SMALL, workload, policies, steps, seed=0, **options))


def test_no_fixed_split_beats_the_oracle_and_none_is_below_the_lower_bound() -> None:
    policies = {f"split {n}": FixedSplit(SplitConfig(cells=n)) for n in range(1, 8)}
    found = rows({**policies, "colocated": Colocated()})
    assert all(row.excess >= -1e-9 for row in found if row.mode == "split")
    assert all(row.seconds >= row.bound_s for row in found)
    best = {row.step: row.seconds for row in found if row.policy == ORACLE}
    for step, seconds in best.items():
        assert seconds == pytest.approx(
            min(row.seconds for row in found if row.step == step and row.mode == "split")
        )


def test_replay_predicts_after_its_first_measured_step() -> None:
    found = [
        row for row in rows({"replay": Replay(ReplayConfig())}, steps=5) if row.policy == "replay"
    ]
    assert found[0].predicted_s is None and all(row.predicted_s for row in found[1:])
    assert all(row.kept >= SMALL.needed and row.decision_s >= 0 for row in found)


def test_the_same_seed_gives_the_same_steps() -> None:
    first, again = (rows({"replay": Replay(ReplayConfig())}, steps=3) for _ in range(2))
    assert [row.seconds for row in first] == [row.seconds for row in again]


def test_a_balancer_makes_training_shorter() -> None:
    dealt, even = (
        rows({}, steps=1, balancer=balancer)[0].train_s for balancer in (None, Cost(CostConfig()))
    )
    assert dealt <= even < 1.5 * dealt


@pytest.mark.parametrize("name", PUBLISHED)
def test_workloads_repeat_with_a_seed_and_have_the_declared_keep_rate(name: str) -> None:
    workload = Published(name=name, steps=10)
    groups, again = workload.groups(9, 4000, 1), workload.groups(9, 4000, 1)
    np.testing.assert_array_equal(groups.policy, again.policy)
    shape = PUBLISHED[name](9, 10)
    assert groups.kept.mean() == pytest.approx(shape.keep, abs=0.06)
    assert np.median(groups.policy) == pytest.approx(shape.policy.median, rel=0.1)
    assert groups.policy.max() <= shape.policy.limit


def trace(directory: Path, **facts: Any) -> Path:
    """A run of two steps, three groups of two records in each, one of which was filtered."""
    lines = [{"what": "clock", "shard": 0, "wall_s": 0.0}]
    for step in range(2):
        for ordinal in range(3):
            verdict = "filtered" if ordinal == 1 else "trained"
            for sample in range(2):
                lines.append(
                    {
                        "what": "record",
                        "step": step,
                        "ordinal": 3 * step + ordinal,
                        "sample": sample,
                        "attempt": 0,
                    }
                    | {
                        "replica": "rollout.0",
                        "sent_s": 1.0,
                        "finished_s": 2.0,
                        "scored_s": 3.0,
                        "n_prompt": 8,
                    }
                    | {"n_actions": 10 * (ordinal + 1) + sample, "verdict": verdict}
                    | facts
                )
    (directory / "trace").mkdir()
    (directory / "trace/controller.0.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return directory


def test_a_trace_is_a_workload_with_the_lengths_and_verdicts_of_the_run(tmp_path: Path) -> None:
    workload = recorded(trace(tmp_path), Lengths(median=50, sigma=0.5, limit=400))
    groups = workload.groups(0, 3, 0)
    np.testing.assert_array_equal(groups.policy, [[10, 11], [20, 21], [30, 31]])
    assert groups.kept.tolist() == [True, False, True] and workload.needed == 2
    assert (groups.judge > 0).all() and (groups.judge_prompt > groups.policy).all()
    assert len(workload.groups(5, 9, 0)) == 9, "more than a step had are drawn from it again"


def test_lengths_of_verdicts_are_taken_from_the_trace(tmp_path: Path) -> None:
    answers = [["judge", 0, 40, 7, 2.0, 2.5], ["small", 1, 30, 5, 2.0, 2.7]]
    groups = recorded(
        trace(tmp_path, asked=answers), Lengths(median=50, sigma=0.5, limit=400)
    ).groups(0, 3, 0)
    assert (groups.judge == 12).all() and (groups.judge_prompt == 70).all()


def test_a_run_without_a_trained_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace/controller.0.jsonl").write_text('{"what":"clock","shard":0,"wall_s":0.0}\n')
    with pytest.raises(DataError, match="no group of the run was trained"):
        recorded(tmp_path, Lengths(median=50, sigma=0.5, limit=400))


def test_the_command_answers_in_a_table_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--trace", str(trace(tmp_path)), "--devices", "16", "--steps", "2"]
    words += [
        "--policies",
        "replay,split:0.25,colocated,coresident,utilisation",
        "--balance",
        "balance/cost",
    ]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "over oracle" in shown and "split:0.25" in shown and "idle share" in shown
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["policies"]) == {
        "oracle",
        "replay",
        "split:0.25",
        "colocated",
        "coresident",
        "utilisation",
    }
    assert len(told["steps"]) == 2 * 6
    first = {row["policy"]: row["share"] for row in told["steps"] if row["step"] == 0}
    begins = {first[name] for name in ("replay", "split:0.25", "utilisation")}
    assert begins == {0.25}, "they begin with the same split"


def test_the_command_says_that_it_takes_several_judges_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for judges in (["strict"], ["strict", "kind"]):
        directory = tmp_path / judges[-1]
        directory.mkdir()
        asked = [[judge, 0, 20, 30, 2.0, 3.0] for judge in judges]
        words = ["simulate", "--trace", str(trace(directory, asked=asked)), "--devices", "16"]
        assert cli.main([*words, "--steps", "1", "--policies", "split:0.25"]) == 0
        note = capsys.readouterr().err
        assert ("judges kind, strict of the run are one judge" in note) == (len(judges) == 2)


def test_a_policy_of_another_plugin_is_named_as_in_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "from gcore_core import hookimpl\n"
        "from gcore_core.contract import providers as p\n"
        "@hookimpl\ndef gcore_placement_policies():\n"
        "    yield p.PlacementProvider(summary='s', factory='gcore_placement.fixed:Colocated')\n"
    )
    words = ["simulate", "--devices", "16", "--steps", "2", "--json", "--policies"]
    figures = []
    with InstalledPlugins(tmp_path) as installed:
        installed.add("third", source)
        for name in ("third", "third/default"):
            assert cli.main([*words, name]) == 0
            figures.append(json.loads(capsys.readouterr().out)["policies"][name])
    assert figures[0]["seconds"] == figures[1]["seconds"] > 0


def test_the_command_draws_the_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [
        "--devices",
        "16",
        "--steps",
        "2",
        "--policies",
        "split:0.25",
        "--plot",
        str(tmp_path / "steps.png"),
    ]
    assert cli.main(["simulate", *words]) == 0
    assert (tmp_path / "steps.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--policies", "replya"],
            "--policies: plugin 'placement' has no placement 'replya' (did you mean 'replay'?)",
        ),
        (["--policies", "split:half"], "--policies: 'half' is not valid for share of split"),
        (["--policies", "colocated:2"], "--policies: colocated has no settings, but '2' is given"),
        (
            ["--policies", "split:0.5", "--devices", "4"],
            "--devices: 4 devices make 1 replicas of 4, two are needed",
        ),
        (["--size", "0"], "--size: must be at least 1, is 0."),
        (["--steps", "0"], "--steps: must be at least 1, is 0."),
        (["--groups", "0"], "--groups: must be at least 1, is 0."),
        (["--seed", "-1"], "--seed: must be at least 0, is -1."),
        (
            ["--policies", "split:0.5", "--profile", '{"base": 1}'],
            "terms: base_s, running_s, cached_s",
        ),
    ],
)
def test_arguments_that_cannot_be_simulated_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_summary_leaves_the_first_steps_out() -> None:
    found = rows({"split": FixedSplit(SplitConfig())}, steps=3)
    last = [row for row in found if row.policy == "split" and row.step == 2]
    assert summary(found, skip=2)["split"]["seconds"] == pytest.approx(last[0].seconds)
